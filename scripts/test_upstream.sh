#!/usr/bin/env bash
# Does the backbone train and test in upstream's MMSegmentation, in place of the maintained onedl line?
#
#   scripts/test_upstream.sh
#
# Trains a tiny UPerNet on drawn shapes for a few iterations, resumes it, and tests it: as trained, fused, multi-scale.
#
# The environment (about 8 GB, PyPI's builds of torch carry CUDA) goes into a temporary folder outside the checkout and
# is deleted at the end. KEEP=folder keeps it there, and takes it again the next time.  PYTHON: the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

UPSTREAM=("mmsegmentation==1.2.2" "mmcv-lite==2.1.*" "mmengine==0.10.*")
# mmsegmentation imports ftfy and regex, and does not ask for them; mmengine imports pkg_resources.
UNSAID=(ftfy regex "setuptools<82")

pinned() { sed -nE "s/^($1==[^ ]+).*/\1/p" requirements.txt | head -n 1; } # pinned <package>: as in the lock

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
env=${KEEP:-$work/env}
[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
"$env/bin/python" -m pip --disable-pip-version-check install -q \
    "$(pinned torch)" "$(pinned torchvision)" "$(pinned timm)" "${UPSTREAM[@]}" "${UNSAID[@]}"
"$env/bin/python" -m pip --disable-pip-version-check list --format=freeze |
    grep -iE '^(torch|torchvision|timm|numpy|mmsegmentation|mmcv[a-z-]*|mmengine)=='


# mmseg 1.2.2 imports mmcv's compiled operators without asking whether they are there, and mmcv-lite has none. UPerNet calls
# none of them either, so a stand-in will do whose operators raise when they are called.
if ! "$env/bin/python" -c 'import mmseg.models' > "$work/log" 2>&1; then
    echo "import mmseg.models: $(tail -n 1 "$work/log"); a stand-in takes the place of mmcv._ext"
    cat > "$("$env/bin/python" -c 'import mmcv; print(mmcv.__path__[0])')/_ext.py" <<'PYTHON'
def __getattr__(name):
    def missing(*_, **__):
        raise RuntimeError(f"mmcv-lite has no operator {name}")

    return missing
PYTHON
fi

export PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1
"$env/bin/python" - "$work" <<'PYTHON'
import sys
from pathlib import Path

sys.path.insert(0, "tests/mm")  # some packages install a module called tests
import shapes

work = Path(sys.argv[1])
shapes.write_config(work / "tiny.py", shapes.write_shapes(work / "data"), iterations=4, interval=2)
PYTHON
run() { echo "\$ $*"; "$env/bin/python" "$@" > "$work/log" 2>&1 || { tail -n 30 "$work/log"; exit 1; }; tail -n 1 "$work/log"; }
run tools/train_seg.py "$work/tiny.py" --work-dir "$work/run" --cfg-options train_cfg.max_iters=2
run tools/train_seg.py "$work/tiny.py" --work-dir "$work/run" --resume
run tools/test_seg.py "$work/tiny.py" "$work/run/iter_4.pth" --work-dir "$work/test"
run tools/test_seg.py "$work/tiny.py" "$work/run/iter_4.pth" --work-dir "$work/test" --fuse
run tools/test_seg.py "$work/tiny.py" "$work/run/iter_4.pth" --work-dir "$work/test" --tta
echo "The backbone trains, resumes and tests with ${UPSTREAM[*]}."
