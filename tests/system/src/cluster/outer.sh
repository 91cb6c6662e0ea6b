# Runs as root in a mount namespace of its own. $1 is a folder with the file system root, $2 the name
# of control groups that do not exist yet, $3 what setpriv does to the bounding set of capabilities,
# $4 the folder of the logs. Makes namespaces with $1 as the root folder, and becomes inner.sh there.
set -eu
root=$1 group=$2 capabilities=$3
mount --make-rprivate /
mount --bind "$root" "$root"
mount --bind "$4" "$root/var/log"
for groups in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [ -e "$groups/cgroup.procs" ] || continue
    mkdir "$groups/$group"
    # The kubelet makes groups with processors in it.
    for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$groups/$group/$file" ] || cat "$groups/$file" > "$groups/$group/$file"
    done
done
export root group capabilities
exec unshare --mount --pid --net --uts --ipc --fork --kill-child sh -eu -c '
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
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
hostname node
ip link set lo up
# The address of the node, for documentation (RFC 5737).
ip address add 192.0.2.1/32 dev lo
ip route add default dev lo
cd "$root"
pivot_root . mnt
# The kubelet passes mounts on to containers.
mount --make-rshared /
exec env -i "group=$group" PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    chroot . sh -c "umount --lazy /mnt && exec setpriv --bounding-set \"\$0\" sh -eu /srv/inner.sh" \
    "$capabilities"
'
