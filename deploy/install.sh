#!/bin/sh
# Installs a release of ggml-vgpu from a folder or a URL, after a check of its checksums:
#
#   sh install.sh --host  https://example.org/vgpu/0.1.0    an executor
#   sh install.sh --guest /mnt/vgpu-0.1.0                   the plugin, with the command
#
#   --signers FILE   refuse a release without a signature of a key in FILE (ALLOWED SIGNERS in
#                    ssh-keygen(1))
#   --archive DIR    unpack the archive below DIR instead of installing packages
#   --download DIR   only fetch and check the files, into DIR
set -eu

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

role='' signers='' archive='' download='' source=''
while [ $# -gt 0 ]; do
    case $1 in
    --host | --guest) role=${1#--} ;;
    --signers | --archive | --download)
        [ $# -ge 2 ] || usage
        case $1 in
        --signers) signers=$2 ;;
        --archive) archive=$2 ;;
        --download) download=$2 ;;
        esac
        shift
        ;;
    -*) usage ;;
    *)
        [ -z "$source" ] || usage
        source=$1
        ;;
    esac
    shift
done
[ -n "$source" ] || usage
[ -n "$role$archive" ] || fail "say --host, --guest or --archive DIR"

case $(uname -m) in
x86_64) deb=amd64 rpm=x86_64 ;;
aarch64) deb=arm64 rpm=aarch64 ;;
*) fail "there are no packages for $(uname -m)" ;;
esac

if [ -n "$download" ]; then
    mkdir -p "$download"
    work=$download
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi

# Fetches a file of the release.
fetch() {
    case $source in
    *://*)
        if command -v curl >/dev/null; then
            curl --fail --silent --show-error --location --proto '=https,file' \
                --proto-redir '=https' --output "$work/$1" "${source%/}/$1"
        elif command -v wget >/dev/null; then
            wget --quiet --output-document="$work/$1" "${source%/}/$1"
        else
            fail "neither curl nor wget is installed"
        fi
        ;;
    *) cp "$source/$1" "$work/$1" ;;
    esac || fail "$source has no $1"
}

fetch SHA256SUMS
if [ -n "$signers" ]; then
    fetch SHA256SUMS.sig
    # Any name in the file will do: the file says whom its owner trusts.
    who=$(ssh-keygen -Y find-principals -s "$work/SHA256SUMS.sig" -f "$signers" | head -n 1) ||
        fail "the release is not signed with a key of $signers"
    [ -n "$who" ] || fail "the release is not signed with a key of $signers"
    ssh-keygen -Y verify -f "$signers" -I "$who" -n ggml-vgpu -s "$work/SHA256SUMS.sig" \
        <"$work/SHA256SUMS" || fail "the signature of SHA256SUMS is wrong"
fi

[ -n "$signers" ] || echo "install.sh: without --signers, nothing tells who made these files" >&2

# The names of the release's files that match a pattern.
named() {
    sed -n 's/^[0-9a-f]\{64\} [ *]//p' "$work/SHA256SUMS" | grep -x "$1"
}

if [ -n "$archive" ]; then
    files=$(named "ggml-vgpu-[^/]*-$rpm-linux\.tar\.xz") || fail "the release has no archive"
elif command -v dpkg >/dev/null; then
    files=$(named "vgpu_[^/]*_$deb\.deb") || fail "the release has no package for Debian"
    [ "$role" = host ] || files="$files $(named "vgpu-guest_[^/]*_$deb\.deb")" ||
        fail "the release has no package of the plugin for Debian"
elif command -v rpm >/dev/null; then
    files=$(named "vgpu-[0-9][^/]*\.$rpm\.rpm") || fail "the release has no package for RPM"
    [ "$role" = host ] || files="$files $(named "vgpu-guest-[^/]*\.$rpm\.rpm")" ||
        fail "the release has no package of the plugin for RPM"
else
    fail "this system has neither dpkg nor rpm: use --archive DIR"
fi

for file in $files; do
    fetch "$file"
    # Only the line of this file: the others were not fetched.
    sum=$(awk -v file="$file" '$2 == file || $2 == "*" file { print $1 }' "$work/SHA256SUMS")
    [ "$(sha256sum "$work/$file" | cut -d ' ' -f 1)" = "$sum" ] ||
        fail "$file is not the file of SHA256SUMS: it is damaged, or of another release"
done
[ -z "$download" ] || {
    for file in $files; do echo "$work/$file"; done
    exit 0
}

if [ -n "$archive" ]; then
    mkdir -p "$archive"
    tar -xJf "$work/$files" -C "$archive"
    echo "$archive/${files%.tar.xz}/bin/vgpu is there. docs/install.md in this folder has the rest."
    exit 0
fi
cd "$work"
# The names have no spaces.
# shellcheck disable=SC2086
if command -v dpkg >/dev/null; then
    dpkg --install $files
else
    rpm --upgrade --verbose $files
fi
case $role in
host) echo "Start the executor: systemctl enable --now vgpu" ;;
guest) echo "See what is missing: vgpu doctor" ;;
esac
