#!/usr/bin/env bash
# Train on a SLURM cluster: one torchrun per machine, elastic, requeued before the time limit.
#
#   sbatch [sbatch options] tools/launch_slurm.sh RECIPE.yaml [--key value ...]
#
# Submit it from the checkout. Options of sbatch on the command line override the lines below:
#   sbatch --nodes=4 --time=2-00:00 tools/launch_slurm.sh recipes/CommonVoice/ASR/CTC/hparams/large.yaml --language fr --data_folder /data/cv/fr
#
# Environment:
#   MIN_NODES      continue while at least this many machines are left (default: all of them)
#   MAX_RESTARTS   how often processes are restarted after one dies (default: 3)
#   SCRIPT         what to run (default: train.py)
#
# Three minutes before the time limit every process saves a checkpoint, and the job is requeued and resumes: see
# tools/README.md.
#
#SBATCH --job-name=sbkit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=1-00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

usage() {
    sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

fail() {
    echo "launch_slurm.sh: $1 (--help explains)" >&2
    exit 2
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    '') fail "name a recipe, such as hparams/ctc.yaml" ;;
esac
[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is not a SLURM job: submit it with sbatch"
cd "${SLURM_SUBMIT_DIR:-.}"
script=${SCRIPT:-train.py}
[[ -f $script ]] || fail "there is no $script in $PWD: submit from the checkout"

torchrun=torchrun
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/torchrun ]]; then
    torchrun=$PWD/.venv/bin/torchrun
fi
command -v "$torchrun" >/dev/null || fail "torchrun is not installed: make .venv first, or activate your environment"

nodes=$SLURM_JOB_NUM_NODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 10000)) # so that jobs that share a machine don't meet
gpus=${SLURM_GPUS_ON_NODE:-1}

# With a store that is shared between rendezvous rounds, torchrun (seen with 2.11) never tells a machine that joins
# later where the others are: all wait a minute for it and give up.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# SLURM's warning reaches only this shell, which passes it on as SIGTERM: every torchrun forwards that to its processes,
# which save a checkpoint and end. USR1 would kill torchrun.
warned=''
trap 'warned=yes; echo "The time limit is near: saving a checkpoint" >&2; kill -TERM "$step" || true' USR1

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # newer srun does not inherit it
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 \
    "$torchrun" --rdzv-backend=c10d "--rdzv-endpoint=$head:$port" \
    "--rdzv-id=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" "--nnodes=${MIN_NODES:-$nodes}:$nodes" \
    "--nproc-per-node=$gpus" "--max-restarts=${MAX_RESTARTS:-3}" "$script" "$@" &
step=$!

status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # the trap ended the wait, but the step goes on
    status=0
    wait "$step" || status=$?
done
if [[ $warned && $status -ne 0 ]]; then
    echo "Back into the queue, to resume from the checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
