#!/bin/sh
# A virtual machine that reaches the executor over vsock, for kernels that do not let programs map
# PCI memory.
#   vgpu serve --listen vsock:4780
# Programs in the guest find the executor by themselves.
exec qemu-system-x86_64 \
    -machine q35 -accel kvm -cpu host -smp 4 -m 4G \
    -drive file=vm1.qcow2,if=virtio \
    -device vhost-vsock-pci,guest-cid=3 \
    "$@"
