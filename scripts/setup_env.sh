#!/usr/bin/env bash
# Set up the environment of this checkout as .venv/.
#
#   scripts/setup_env.sh demo      core + train + export, and what the tests need
#   scripts/setup_env.sh docs      the same, and what builds the site
#   scripts/setup_env.sh full      everything, with mmcv's operators built from source
#   scripts/setup_env.sh lint      ruff alone, without .venv/; prints its path
#   scripts/setup_env.sh remove    delete every cached environment
#
# pip takes only files whose hash is in requirements.txt, on the platforms for which that lock is complete.
#
# The packages (5 GB, 15 minutes for `full`) go into a cache outside the checkout, keyed by a hash of the lock, this file
# and the Python version, so that a second checkout, or a clean one, starts at once. `.venv/` itself is a thin
# environment on top of it that holds only this checkout's `wbmm`.
#
# WBMM_ENV_HOME: where the cache is (default: ~/.cache/wbmm/env).  PYTHON: the interpreter (3.10 to 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
ENV_HOME=${WBMM_ENV_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/wbmm/env}
PROFILE=${1:-full}
declare -A SECTIONS=([lint]="lint" [demo]="lint build demo" [docs]="lint build demo docs"
    [full]="lint build demo docs full")
declare -A EXTRAS=([demo]="train,export,dev" [docs]="train,export,dev,docs" [full]="all")

say() { printf '[setup] %s\n' "$*" >&2; }

if [ "$PROFILE" = remove ]; then
    rm -rf "$ENV_HOME"/lint-* "$ENV_HOME"/demo-* "$ENV_HOME"/docs-* "$ENV_HOME"/full-*
    say "removed the environments in $ENV_HOME"
    exit 0
fi
if [ -z "${SECTIONS[$PROFILE]:-}" ]; then
    say "unknown profile '$PROFILE': expected one of lint, demo, docs, full, remove"
    exit 2
fi
if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))'; then
    say "$("$PYTHON" --version) at '$PYTHON': Python 3.10, 3.11 or 3.12 is needed; choose one with PYTHON=python3.11"
    exit 2
fi

locked() { # is the lock complete for this platform?
    [ "$(uname -sm)" = "Linux x86_64" ] && "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

key() { # what the packages depend on; setup.py only where pip resolves its version ranges
    { cat requirements.txt scripts/setup_env.sh; locked || cat setup.py; "$PYTHON" --version; echo "$1"; } |
        sha256sum | cut -c1-12
}

section() { sed -n "/^# \[$1\]/,/^# \[/p" requirements.txt; } # section <name>: that part of the lock

constraints() { # the versions without hashes; mmcv asks for opencv-python by name, so both get the one version
    sed -nE 's/ *\\$//; /^[[:alnum:]]/p; s/^(opencv-python)-headless/\1/p' requirements.txt
}

install_section() { # install_section <name>: exactly the files that the lock lists
    python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation \
        --require-hashes -r <(section "$1") ||
        { say "section [$1] of requirements.txt could not be installed as it is locked: pip says why above"; exit 1; }
}

install_mmcv() { # install_mmcv <command>...: run the command that installs it, and check that its operators are there
    # Only a source distribution is published. In pip's isolated build it finds no torch and silently leaves its
    # operators out, hence --no-build-isolation, the order and the check.
    # Debug symbols are two thirds of its build time. These variables replace Python's own flags, so -O3 is among them.
    say "building mmcv with its operators (about 8 minutes on 2 cores, once; then in pip's wheel cache)"
    local flags='-O3 -g0 -DNDEBUG -fwrapv'
    CFLAGS=$flags CXXFLAGS=$flags "$@"
    python -c 'from mmcv.ops import nms' ||
        { say "mmcv was built without its operators: is a C++ compiler (g++) installed? See docs/install.md"; exit 1; }
}

build() { # build <folder> <profile>: install the pinned packages into a new environment; the marker comes last
    local dir=$1 profile=$2 part
    rm -rf "$dir"
    "$PYTHON" -m venv "$dir"
    local -x PATH="$dir/bin:$PATH" # from here on `python` is the new one
    if locked || [ "$profile" = lint ]; then
        for part in ${SECTIONS[$profile]}; do
            say "installing [$part] of requirements.txt into $dir"
            install_section "$part"
        done
        if [ "$profile" = full ]; then install_mmcv install_section mmcv; fi
    else
        say "no hashes are checked: requirements.txt is complete for Linux on x86-64 with Python 3.11 and 3.12 only"
        constraints >"$dir/constraints.txt"
        local pip="python -m pip --disable-pip-version-check install -q --no-build-isolation -c $dir/constraints.txt"
        $pip setuptools wheel packaging ninja torch torchvision
        if [ "$profile" = full ]; then install_mmcv $pip onedl-mmcv; fi
        $pip ".[${EXTRAS[$profile]}]"
        python -m pip uninstall -q -y wbmm # each checkout brings its own, see link()
        rm -rf build ./*.egg-info
    fi
    touch "$dir/.complete"
}

link() { # link <folder>: make .venv/ a thin environment over it, with this checkout installed in place
    local base=$1 here="$PWD/.venv"
    rm -rf .venv
    "$PYTHON" -m venv --without-pip .venv
    local site base_site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    base_site=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf 'import site; site.addsitedir(%s)\n' "'$base_site'" >"$site/zz_wbmm_packages.pth"
    local tool
    for tool in "$base"/bin/*; do # console scripts must start this environment's Python to see this checkout
        if [ -e ".venv/bin/${tool##*/}" ] || [ ! -f "$tool" ]; then continue; fi
        if head -c 200 "$tool" | grep -aq "^#!$base/bin/python"; then
            sed "1s|.*|#!$here/bin/python|" "$tool" >".venv/bin/${tool##*/}"
            chmod +x ".venv/bin/${tool##*/}"
        else
            ln -s "$tool" ".venv/bin/${tool##*/}"
        fi
    done
    .venv/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
    rm -rf build
    echo "$base" >.venv/.base
}

FULL="$ENV_HOME/full-$(key full)"
BASE="$ENV_HOME/$PROFILE-$(key "$PROFILE")"
if [ -e "$FULL/.complete" ]; then BASE=$FULL; fi # it holds everything that the smaller profile does
mkdir -p "$ENV_HOME"
exec 9>"$BASE.lock"
flock 9 # two checkouts may want the same environment at once
if [ ! -e "$BASE/.complete" ]; then build "$BASE" "$PROFILE"; fi
if [ "$PROFILE" = lint ]; then
    echo "$BASE/bin/ruff"
elif [ "$(cat .venv/.base 2>/dev/null)" != "$BASE" ] || [ ! -x .venv/bin/wbmm ]; then
    link "$BASE"
    say ".venv/ is ready ($PROFILE): .venv/bin/wbmm doctor"
fi
