#!/usr/bin/env bash
# Train on this machine, or on several when it is started on each of them.
#
#   tools/launch_local.sh [options] RECIPE.yaml [--key value ...]
#
#   --processes N      processes on this machine (default: one per GPU, 1 without GPUs)
#   --nodes N|MIN:MAX  machines; with a range, training continues while at least MIN are left (default: 1)
#   --head HOST:PORT   where machines meet: one of them and a free port, the same on all of them
#   --id NAME          name of the job, the same on all machines (default: sbkit)
#   --max-restarts N   how often processes are restarted after one dies (default: 3)
#   --script FILE      what to run (default: train.py)
#   -h, --help         this text
#
# Examples:
#   tools/launch_local.sh hparams/ctc.yaml --number_of_epochs 30
#   tools/launch_local.sh --nodes 2 --head gpu01:29400 hparams/ctc.yaml     # on gpu01 and on gpu02
#
# After a process dies, all restart from the newest checkpoint: see tools/README.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

fail() {
    echo "launch_local.sh: $1 (--help explains)" >&2
    exit 2
}

count_gpus() {
    local found=0
    if command -v nvidia-smi >/dev/null; then
        found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
    fi
    echo $((found > 0 ? found : 1))
}

processes='' nodes=1 head='' id=sbkit max_restarts=3 script=$root/train.py
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --processes | --nodes | --head | --id | --max-restarts | --script)
            [[ $# -ge 2 ]] || fail "$1 needs a value"
            case $1 in
                --processes) processes=$2 ;;
                --nodes) nodes=$2 ;;
                --head) head=$2 ;;
                --id) id=$2 ;;
                --max-restarts) max_restarts=$2 ;;
                --script) script=$2 ;;
            esac
            shift 2 ;;
        -*) fail "unknown option $1; the recipe comes before its own options" ;;
        *) break ;;
    esac
done
[[ $# -gt 0 ]] || fail "name a recipe, such as hparams/ctc.yaml"
[[ -f $script ]] || fail "there is no script $script"
[[ $nodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "--nodes must be a number or a range such as 2:4, not $nodes"

if [[ $nodes == 1 ]]; then
    meeting=(--standalone)
else
    [[ -n $head ]] || fail "several machines need --head HOST:PORT"
    meeting=(--rdzv-backend=c10d "--rdzv-endpoint=$head" "--rdzv-id=$id")
fi

# An active environment comes first, then the one that "make" has made here.
torchrun=torchrun
if [[ -z ${VIRTUAL_ENV:-} && -x $root/.venv/bin/torchrun ]]; then
    torchrun=$root/.venv/bin/torchrun
fi
command -v "$torchrun" >/dev/null || fail "torchrun is not installed: make .venv first, or activate your environment"

# With a store that is shared between rendezvous rounds, torchrun (seen with 2.11) never tells a machine that joins
# later where the others are: all wait a minute for it and give up.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "$torchrun" "${meeting[@]}" "--nnodes=$nodes" "--nproc-per-node=${processes:-$(count_gpus)}" \
    "--max-restarts=$max_restarts" "$script" "$@"
