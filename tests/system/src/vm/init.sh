#!/bin/busybox sh
# The first program of the guest. Runs each line from the serial port, and reports its exit status.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
dmesg -n 1
export PATH=/bin:/llama LD_LIBRARY_PATH=/llama HOME=/tmp
while read -r module; do insmod "$module" 2>/dev/null; done </modules/list
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then
    ip link set eth0 up
    ip addr add 10.0.2.15/24 dev eth0
    ip route add default via 10.0.2.2
fi
stty -F /dev/ttyS0 -echo 2>/dev/null
exec </dev/ttyS0 >/dev/ttyS0 2>&1
echo "@@ready"
while read -r line; do
    sh -c "$line" </dev/null
    echo "@@done $?"
done
poweroff -f
