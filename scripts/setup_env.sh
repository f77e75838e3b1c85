#!/usr/bin/env bash
# Set up the environment of this checkout as .venv/.
#
#   scripts/setup_env.sh demo      core + train + export
#   scripts/setup_env.sh full      everything, with mmcv's operators built from source
#   scripts/setup_env.sh remove    delete every cached environment
#
# The packages (5 GB, 25 minutes for `full`) go into a cache outside the checkout, keyed by a hash of the requirement
# files and the Python version, so that a second checkout, or a clean one, starts at once. `.venv/` itself is a thin
# environment on top of it that holds only this checkout's `wbmm`.
#
# WBMM_ENV_HOME: where the cache is (default: ~/.cache/wbmm/env).  PYTHON: the interpreter (3.10 to 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
ENV_HOME=${WBMM_ENV_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/wbmm/env}
PROFILE=${1:-full}
declare -A EXTRAS=([demo]="train,export" [full]="all")

say() { printf '[setup] %s\n' "$*" >&2; }

if [ "$PROFILE" = remove ]; then
    rm -rf "$ENV_HOME"/demo-* "$ENV_HOME"/full-* "$ENV_HOME/.lock"
    say "removed the environments in $ENV_HOME"
    exit 0
fi
if [ -z "${EXTRAS[$PROFILE]:-}" ]; then
    say "unknown profile '$PROFILE': expected one of demo, full, remove"
    exit 2
fi
if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))'; then
    say "$("$PYTHON" --version) at '$PYTHON': Python 3.10, 3.11 or 3.12 is needed; choose one with PYTHON=python3.11"
    exit 2
fi

key() { { cat requirements.txt setup.py scripts/setup_env.sh; "$PYTHON" --version; echo "$1"; } | sha256sum | cut -c1-12; }

build() { # build <folder> <profile>: install the pinned packages into a new environment; the marker comes last
    local dir=$1 pip="$1/bin/python -m pip --disable-pip-version-check"
    rm -rf "$dir"
    "$PYTHON" -m venv "$dir"
    say "installing torch and the build tools into $dir"
    $pip install -q -c requirements.txt setuptools wheel packaging ninja torch torchvision
    if [ "$2" = full ]; then
        # Only a source distribution is published. In pip's isolated build it finds no torch and silently leaves its
        # operators out, hence the order, the flag and the check.
        # Debug symbols are two thirds of its build time. These variables replace Python's own flags, so -O3 is among them.
        say "building mmcv with its operators (about 8 minutes on 2 cores, once; then in pip's wheel cache)"
        local flags='-O3 -g0 -DNDEBUG -fwrapv'
        CFLAGS=$flags CXXFLAGS=$flags PATH="$dir/bin:$PATH" $pip install -q --no-build-isolation -c requirements.txt onedl-mmcv
        "$dir/bin/python" -c 'from mmcv.ops import nms' ||
            { say "mmcv was built without its operators: is a C++ compiler (g++) installed? See docs/install.md"; exit 1; }
    fi
    say "installing the extras [${EXTRAS[$2]}]"
    $pip install -q --no-build-isolation -c requirements.txt ".[${EXTRAS[$2]}]"
    $pip uninstall -q -y wbmm # each checkout brings its own, see link()
    rm -rf build ./*.egg-info
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
exec 9>"$ENV_HOME/.lock"
flock 9 # two checkouts may start at once
if [ ! -e "$BASE/.complete" ]; then build "$BASE" "$PROFILE"; fi
if [ "$(cat .venv/.base 2>/dev/null)" != "$BASE" ] || [ ! -x .venv/bin/wbmm ]; then
    link "$BASE"
    say ".venv/ is ready ($PROFILE): .venv/bin/wbmm doctor"
fi
