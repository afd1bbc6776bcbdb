# Sourced by the pretraining scripts: starts one `hybridpar train` process for each rank through torchrun.
#
#   launch CONFIG [--section.key value ...]
#
# Grid, by environment variables:       TP PP DP (DP empty: fill the job)
# Processes on this host:               NPROC (default: the GPUs found, else TP * PP * DP on the CPU with Gloo)
# Several hosts, on each the same line: NNODES NODE_RANK MASTER_ADDR MASTER_PORT (torchrun's rendezvous)
launch() {
    local config=$1; shift
    local tp="${TP:-1}" pp="${PP:-1}" dp="${DP:-1}" nnodes="${NNODES:-1}" gpus
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    if [ -z "${NPROC:-}" ]; then
        if [ "$gpus" -gt 0 ]; then NPROC=$gpus; else NPROC=$(( (tp * pp * dp + nnodes - 1) / nnodes )); fi
    fi
    local rendezvous=(--standalone)
    if [ "$nnodes" -gt 1 ]; then
        rendezvous=(--nnodes "$nnodes" --node-rank "${NODE_RANK:?rank of this host, 0 to NNODES - 1}"
                    --master-addr "${MASTER_ADDR:?address of host 0}" --master-port "${MASTER_PORT:-29500}")
    fi
    [ "$gpus" -gt 0 ] && dp="${DP:-0}"
    # one core a process unless told otherwise: ranks are the parallelism
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$NPROC" \
        -m hybridpar train "$config" --parallel.tp "$tp" --parallel.pp "$pp" --parallel.dp "$dp" "$@"
}
