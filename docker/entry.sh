#!/bin/sh
# What a container runs: sbkit, which computes on the device that the image was built for unless another is named. A
# server that was built for a GPU and finds none ends with that message, and doesn't go on slowly.
set -eu
case " $* " in
*" --device "* | *" --device="*) ;;
" serve "* | " train "* | " transcribe "* | " evaluate "* | " enhance "* | " speak "* | " label "* | " clean "* | \
    " tokenize "* | " resynthesize "* | " run "* | " listen "* | " tune "* | " rerun "* | \
    " show "*) set -- "$@" --device "$SBKIT_DEVICE" ;;
esac
exec sbkit "$@"
