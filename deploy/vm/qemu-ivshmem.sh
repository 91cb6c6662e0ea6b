#!/bin/sh
# A virtual machine with a vGPU, on any QEMU. Start the executor first:
#   vgpu serve --vm vm1,socket=/run/vgpu/vm1.sock
exec qemu-system-x86_64 \
    -machine q35 -accel kvm -cpu host -smp 4 -m 4G \
    -drive file=vm1.qcow2,if=virtio \
    -chardev socket,id=vgpu0,path=/run/vgpu/vm1.sock \
    -device ivshmem-doorbell,chardev=vgpu0,vectors=1 \
    "$@"
