# Runs as root in a mount namespace of its own. $1 is a folder with the file system root, $2 the
# name of a control group that does not exist yet, $3 what setpriv does to the bounding set of
# capabilities. Starts inner.sh, which is beside root, in that group and in its own namespaces.
set -eu
mount --make-rprivate /
mkdir "$1/groups"
mount -t cgroup2 cgroup2 "$1/groups"
# Groups without a process are left of runs that were killed.
for group in "$1"/groups/vgpu-tests-*; do
    if grep --quiet '^populated 0' "$group/cgroup.events" 2> /dev/null; then
        find "$group" -depth -type d -exec rmdir {} + || :
    fi
done
mkdir "$1/groups/$2"
echo $$ > "$1/groups/$2/cgroup.procs"
exec unshare --cgroup --pid --net --uts --ipc --fork --kill-child \
    sh -eu "$1/inner.sh" "$1/root" "$3"
