#!/bin/sh
# A virtual machine that reaches the executor over vsock, for guests whose kernel does not let programs map PCI memory.
#   vgpu serve --listen vsock:4780
# The programs in the guest find it by themselves (VGPU_ENDPOINT=vsock).
exec qemu-system-x86_64 \
    -machine q35 -accel kvm -cpu host -smp 4 -m 4G \
    -drive file=vm1.qcow2,if=virtio \
    -device vhost-vsock-pci,guest-cid=3 \
    "$@"
