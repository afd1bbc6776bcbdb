# Sourced by the pretraining scripts: starts one `hybridpar train` process for each rank, and again where one fails; on several
# hosts by torchrun's agent (hybridpar.train.launching.hosts). Their launcher takes the place of the shell, so that a signal to the script
# reaches it: a container's or a batch system's SIGTERM saves before it ends.
#
#   launch CONFIG [--ranks N] [--section.key value ...]
#
# Grid, by environment variables:       TP PP DP. Those that are given stay; the planner (hybridpar plan) chooses the others,
#                                       by a quick profile of this machine, which is kept. With all three given, on several
#                                       hosts, and for a plan.toml, nothing is planned: those left out are the configuration's
# Samples of a step:                    BATCH (default: the configuration's micro-batches on its replicas), where planned
# Processes on this host:               the flag --ranks, as everywhere (default: the GPUs found, else one a core, or as many as
#                                       the grid has)
# Several hosts, on each the same line: NNODES NODE_RANK MASTER_ADDR MASTER_PORT (torchrun's rendezvous), RESTARTS (default 0:
#                                       how often all ranks are started again, from the last checkpoint, where one fails)
launch() {
    local config=$1; shift
    local nnodes="${NNODES:-1}" grid=() kept="" number=1 axis name given least word json=() ranks="" rest=()
    if [ -n "${NPROC:-}" ]; then
        echo "hybridpar: NPROC = '$NPROC': is named --ranks; leave the variable out, and add --ranks $NPROC" >&2
        return 2
    fi
    while [ $# -gt 0 ]; do
        case "$1" in
            --ranks) ranks="${2:-}"; shift $(( $# > 1 ? 2 : 1 ));;
            --ranks=*) ranks="${1#*=}"; shift;;
            *) rest+=("$1"); shift; continue;;
        esac
        if [[ ! "$ranks" =~ ^[1-9][0-9]{0,8}$ ]]; then
            echo "hybridpar: --ranks $ranks: must be a whole number, at least 1; try --ranks 1, or leave it out" >&2
            return 2
        fi
    done
    set -- ${rest[@]+"${rest[@]}"}
    for name in TP PP DP NNODES BATCH MASTER_PORT NODE_RANK RESTARTS; do
        given="${!name:-}" least=1
        [[ "$name" =~ ^(NODE_RANK|RESTARTS)$ ]] && least=0
        if [[ -n "$given" && ! "$given" =~ ^(0|[1-9][0-9]{0,8})$ || "$given" == 0 && "$least" == 1 ]]; then
            echo "hybridpar: $name = '$given': must be a whole number, at least $least; try $name=$least, or leave it out" >&2
            return 2
        fi
    done
    for axis in TP PP DP; do
        given="${!axis:-}"
        if [ -n "$given" ]; then
            number=$(( number * given )); kept+="${kept:+,}${axis,,}=$given"; grid+=("--parallel.${axis,,}" "$given")
        fi
    done
    # one core a process unless told otherwise: ranks are the parallelism
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    # memory in pages of 2 MiB where Linux has them: passes over weights take an eighth less time
    export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
    local rendezvous=()
    if [ "$nnodes" -gt 1 ]; then
        rendezvous=(--nnodes "$nnodes" --node-rank "${NODE_RANK:?rank of this host, 0 to NNODES - 1}"
                    --master-addr "${MASTER_ADDR:?address of host 0}" --master-port "${MASTER_PORT:-29500}"
                    --max-restarts "${RESTARTS:-0}")
        if [ "$NODE_RANK" -ge "$nnodes" ]; then
            echo "hybridpar: NODE_RANK = '$NODE_RANK': must be below NNODES = $nnodes, the first host's is 0; try NODE_RANK=0" >&2
            return 2
        fi
        if [ -z "$ranks" ]; then
            ranks=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
            [ "$ranks" -gt 0 ] || ranks=$(( (number + nnodes - 1) / nnodes ))
        fi
    elif [ "${#grid[@]}" -lt 6 ] && ! grep -q '^\[plan\]' "$config"; then
        "$PYTHON" -m hybridpar plan "$config" "$@" --brief --grid "$kept" --ranks "${ranks:-0}" \
            --batch_size "${BATCH:-0}" --output "runs/plans/$(basename "$config")" >/dev/null
        config="runs/plans/$(basename "$config")" grid=()
        for word in "$@"; do [ "$word" != --json ] || json=(--json); done
        set -- ${json[@]+"${json[@]}"}  # the plan has the other flags in it
    fi
    if [ -z "$ranks" ] && [ "${#grid[@]}" -eq 6 ]; then
        ranks=$number
    elif [ -z "$ranks" ]; then
        ranks=$(awk -F ' *= *' '/^\[/ { section = $1 } section ~ /^\[parallel\]/ && $1 ~ /^(tp|pp|dp)$/ && $2 + 0 > 0 {
                n = (n ? n : 1) * ($2 + 0) } END { print n ? n : 1 }' "$config")
    fi
    if [ "$nnodes" -gt 1 ]; then
        exec "$PYTHON" -m hybridpar.train.launching.hosts "${rendezvous[@]}" --nproc-per-node "$ranks" \
            "$config" ${grid[@]+"${grid[@]}"} "$@"
    else
        exec "$PYTHON" -m hybridpar train "$config" --ranks "$ranks" ${grid[@]+"${grid[@]}"} "$@"
    fi
}
