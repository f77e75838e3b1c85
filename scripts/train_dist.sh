#!/usr/bin/env bash
# Train on all GPUs of this node (or GPUS=2 of them; on a machine without GPUs, GPUS is the number of processes):
#   scripts/train_dist.sh configs/imagenet/wbmm_t.yaml data.root=/data/imagenet
# Segmentation, detection: TOOL=train_seg scripts/train_dist.sh configs/ade20k/NAME.py
# Several nodes: the same line on each, with NODES=2 MASTER=host:29500.
set -euo pipefail
GPUS=${GPUS:-gpu} NODES=${NODES:-1} MASTER=${MASTER:-127.0.0.1:0}
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes="$NODES" --nproc_per_node="$GPUS" \
    --rdzv_backend=c10d --rdzv_endpoint="$MASTER" --rdzv_id="${RUN_ID:-wbmm}" \
    "$(dirname "$0")/../tools/${TOOL:-train}.py" "$@"
