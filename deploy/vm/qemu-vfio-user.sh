#!/bin/sh
# A virtual machine with the PCI function 10de:2331, on QEMU 10.1 or newer. Start the executor
# first:
#   vgpu serve --device vfio-user --vm vm1,socket=/run/vgpu/vm1.sock
exec qemu-system-x86_64 \
    -object memory-backend-memfd,id=mem,size=4G,share=on \
    -machine q35,memory-backend=mem -accel kvm -cpu host -smp 4 -m 4G \
    -drive file=vm1.qcow2,if=virtio \
    -device '{"driver":"vfio-user-pci","id":"vgpu0","socket":{"type":"unix","path":"/run/vgpu/vm1.sock"}}' \
    "$@"
