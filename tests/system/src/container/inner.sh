# Mounts what systemd expects below $1, makes $1 the root folder, and becomes systemd. systemd sees
# its own control group as the root of the hierarchy. /sys is read-only, so that udev does not run
# and leaves the devices of this machine alone. $2 names capabilities that no process there gets.
root=$1
# Settings of the kernel are for this machine, but for those of the network.
protect() {
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount --bind "$root/proc/sys/net" "$root/proc/sys/net"
    mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/sys"
    if [ -e "$root/proc/sysrq-trigger" ]; then
        mount --bind /dev/null "$root/proc/sysrq-trigger"
    fi
}
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
protect
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
# For the networks of containers of users.
if [ -c /dev/net/tun ]; then
    mkdir "$root/dev/net"
    : > "$root/dev/net/tun"
    mount --bind /dev/net/tun "$root/dev/net/tun"
fi
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs "$root/run"
# The kernel lets a user namespace mount a new /proc only if a /proc is there that hides nothing.
mkdir -p "$root/run/host/proc"
mount -t proc -o nosuid,nodev,noexec proc "$root/run/host/proc"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/tmp"
cd "$root"
pivot_root . mnt
enter='umount --lazy /mnt && exec setpriv --bounding-set "$0" /lib/systemd/systemd'
exec env -i container=vgpu-tests PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    chroot . sh -c "$enter" "$2"
