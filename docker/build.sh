#!/bin/sh
# Builds an image of sbkit, and tries its server on the device that it is for.
#
#   docker/build.sh cpu|cuda [TAG [OPTIONS OF docker build]]        TAG is sbkit:cpu or sbkit:cuda by default
#
# The last step starts the server in the image, has it compute and asks where it did. If another device answers, or none,
# the image is untagged and this fails: an image for a GPU is built where there is one.
set -eu
device=${1:?say which: docker/build.sh cpu, or docker/build.sh cuda}
tag=${2:-sbkit:$device}
[ $# -lt 2 ] && shift $# || shift 2
cd "$(dirname "$0")/.."
docker build --build-arg DEVICE="$device" --file docker/Dockerfile --tag "$tag" "$@" .
[ "$device" = cuda ] && gpus="--gpus all" || gpus=
# shellcheck disable=SC2086
if ! docker run --rm $gpus --entrypoint /opt/venv/bin/python "$tag" /opt/sbkit/docker/try_server.py "$device"; then
    docker rmi --no-prune "$tag" > /dev/null
    echo "build.sh: the server of $tag doesn't compute on $device, so the image isn't kept" >&2
    exit 1
fi
