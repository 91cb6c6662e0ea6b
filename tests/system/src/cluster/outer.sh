# Runs as root in a mount namespace of its own. $1 is a folder with the file system root, $2 the
# name of control groups that do not exist yet, $3 what setpriv does to the bounding set of
# capabilities, $4 the folder of the logs. Makes namespaces with root as the root folder, and
# becomes /srv/inner.sh there. The control groups are below those of this process, whose limits
# hold.
set -eu
root=$1/root capabilities=$3
mount --make-rprivate /
mount --bind "$root" "$root"
mount --bind "$4" "$root/var/log"
# Read once, since this process joins other groups.
cat /proc/self/cgroup > "$1/membership"
mkdir "$1/groups"
while IFS=: read -r number controllers path; do
    groups=$1/groups/$number
    case $controllers in
        name=*) continue ;;
        "") mkdir "$groups" && mount -t cgroup2 cgroup2 "$groups" ;;
        *) mkdir "$groups" && mount -t cgroup -o "$controllers" cgroup "$groups" ;;
    esac
    # Groups without a process are left of runs that were killed.
    find "$groups$path" -maxdepth 1 -name 'vgpu-tests-*' -mmin +10 | while read -r left; do
        if [ -z "$(find "$left" -name cgroup.procs -exec cat {} +)" ]; then
            find "$left" -depth -type d -exec rmdir {} +
        fi
    done
    group=$groups$path/$2
    mkdir "$group"
    # In version 1 a group has no processors of its own accord.
    if [ "$controllers" = cpuset ]; then
        for file in cpuset.cpus cpuset.mems; do
            cat "$groups$path/$file" > "$group/$file"
        done
    fi
    echo $$ > "$group/cgroup.procs"
done < "$1/membership"
export root capabilities
exec unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child sh -eu -c '
mount --make-rprivate /
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/run"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
# The kubelet reads messages of the kernel about memory that is used up.
for device in null zero full random urandom tty kmsg; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
# Settings of the kernel are for this machine, but for those of the network. The kubelet finds those
# that it wants, in files.
settings=$root/proc/sys
mount --bind "$settings" "$settings"
mount --bind "$settings/net" "$settings/net"
mount -o remount,bind,ro,nosuid,nodev,noexec "$settings"
mkdir "$root/run/settings"
while read -r name value; do
    file=$root/run/settings/$(echo "$name" | tr / .)
    echo "$value" > "$file"
    mount --bind "$file" "$settings/$name"
done << "END"
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END
[ ! -e "$root/proc/sysrq-trigger" ] || mount --bind /dev/null "$root/proc/sysrq-trigger"
# The node sees its own control groups as the roots of their hierarchies.
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
groups=$root/sys/fs/cgroup
if grep --quiet -E "^[0-9]+:([^:]*,)?memory(,[^:]*)?:" /proc/self/cgroup; then
    mount -t tmpfs -o nosuid,nodev,noexec,mode=755 tmpfs "$groups"
    while IFS=: read -r number controllers path; do
        case $controllers in
            name=* | "") continue ;;
        esac
        mkdir "$groups/$controllers"
        mount -t cgroup -o "$controllers" cgroup "$groups/$controllers"
        for controller in $(echo "$controllers" | tr , " "); do
            [ -e "$groups/$controller" ] || ln -s "$controllers" "$groups/$controller"
        done
    done < /proc/self/cgroup
else
    mount -t cgroup2 cgroup2 "$groups"
    # A group with processes passes no controllers on.
    mkdir "$groups/node"
    echo 0 > "$groups/node/cgroup.procs"
    for controller in $(cat "$groups/cgroup.controllers"); do
        echo "+$controller" > "$groups/cgroup.subtree_control"
    done
fi
hostname node
ip link set lo up
# The address of the node, for documentation (RFC 5737).
ip address add 192.0.2.1/32 dev lo
ip route add default dev lo
cd "$root"
pivot_root . mnt
# The kubelet passes mounts on to containers.
mount --make-rshared /
enter="umount --lazy /mnt && exec setpriv --bounding-set \"\$0\" sh -eu /srv/inner.sh"
exec env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    chroot . sh -c "$enter" "$capabilities"
'
