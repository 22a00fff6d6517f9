#!/bin/sh
# Installs sbkit into /opt/venv of a Debian 12 as root: what an image is made of, also in the chroot of its test.
#
#   docker/install.sh cpu|cuda
#
# TORCH_INDEX names another index of torch's wheels than pytorch.org's; an empty one leaves it to pip's settings.
set -eu
device=${1:?say which: cpu or cuda}
source=$(dirname "$(dirname "$(readlink -f "$0")")")
case $device in
cpu) index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} ;;
cuda) index=${TORCH_INDEX-} ;;  # PyPI's wheels are those for CUDA
*) echo "install.sh: $device is neither cpu nor cuda" >&2; exit 2 ;;
esac

apt-get update -q
# g++ and Python's headers: the kernels for training, and what torch.compile makes.
apt-get install -y -q --no-install-recommends ca-certificates g++ python3-dev python3-venv
python3 -m venv /opt/venv
pip="/opt/venv/bin/python -m pip install --no-cache-dir -q"
$pip ${index:+--index-url "$index"} 'torch>=2.11,<2.12' 'torchaudio>=2.11,<2.11.1'
$pip "$source[demo,export,serve,speech,ssl,tensorboard]"
if [ "$device" = cuda ]; then  # the two have the same files, of which only one can be there
    /opt/venv/bin/python -m pip uninstall -y -q onnxruntime
    $pip 'onnxruntime-gpu[cuda,cudnn]>=1.20'
fi
/opt/venv/bin/sbkit new --help > /dev/null
