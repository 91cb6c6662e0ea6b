#!/bin/sh
# A virtual machine on Cloud Hypervisor, which connects vsock to Unix sockets.
#   vgpu serve --listen vsock:/run/vgpu/vm1.vsock:4780
exec cloud-hypervisor \
    --kernel vmlinux --cmdline 'console=hvc0 root=/dev/vda1 rw' \
    --cpus boot=4 --memory size=4G \
    --disk path=vm1.raw \
    --vsock cid=3,socket=/run/vgpu/vm1.vsock \
    "$@"
