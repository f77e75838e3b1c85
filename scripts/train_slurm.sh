#!/usr/bin/env bash
#SBATCH --job-name=wbmm --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00
#SBATCH --requeue --open-mode=append --signal=B:USR1@120
# sbatch scripts/train_slurm.sh configs/imagenet/wbmm_t.yaml out=runs/wbmm_t data.root=/data/imagenet
# 120 s before the end the run saves, leaves a marker in `out`, and this script requeues the job (docs/training.md).
# Segmentation, detection: TOOL=train_seg sbatch scripts/train_slurm.sh configs/ade20k/NAME.py --work-dir work_dirs/NAME
# mmengine saves nothing at a signal: the requeued job continues from the newest checkpoint.
set -uo pipefail
if [ "${TOOL:-train}" = train ]; then
    OUT=$(printf '%s\n' "$@" | sed -n 's/^out=//p' | tail -1) RESUME=resume=auto
    [ -n "$OUT" ] || { echo "say out=FOLDER: the marker of an interrupted run is looked for there" >&2; exit 2; }
else
    OUT=$(printf '%s\n' "$@" | sed -n '/^--work-dir$/{n;p}; s/^--work-dir=//p' | tail -1) RESUME=--resume
    [ -n "$OUT" ] || { echo "say --work-dir FOLDER: a requeued job continues the run there" >&2; exit 2; }
fi
export MASTER="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1):29500" RUN_ID=$SLURM_JOB_ID NODES=$SLURM_NNODES
rm -f "$OUT/interrupted.json"  # of the sitting before, or a job that cannot start would be requeued for ever
if [ "${TOOL:-train}" = train ]; then
    trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1  # to every process of the step; torchrun must not die of it
else
    trap 'exec scontrol requeue "$SLURM_JOB_ID"' USR1
fi
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'trap "" USR1; exec "$0" "$@"' \
    "${WBMM_HOME:-$PWD}/scripts/train_dist.sh" "$@" "$RESUME" &
while wait $!; STATUS=$?; kill -0 $! 2>/dev/null; do :; done
[ ! -f "$OUT/interrupted.json" ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$STATUS"
