# The first process of a node. Starts the programs of the cluster, each with its log below /var/log,
# and prints "started".
cd /srv
for program in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; do
    printf '#!/bin/sh\nexec /srv/kubernetes %s "$@"\n' $program > /usr/local/bin/$program
    chmod 755 /usr/local/bin/$program
done

mkdir -p /etc/cni/net.d
cat > /etc/cni/net.d/bridge.conflist << 'END'
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true,
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]],
             "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
# runc may not be permitted to protect containers from the end of memory. The devices of claims are
# files (CDI), which containerd 1.7 reads only if told so.
cat > containerd.toml << 'END'
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
cni = { bin_dir = "/usr/lib/cni", conf_dir = "/etc/cni/net.d" }
END
containerd --config containerd.toml > /var/log/containerd 2>&1 &

etcd --data-dir etcd --unsafe-no-fsync > /var/log/etcd 2>&1 &
openssl genrsa -out account.key 2048 2> /var/log/openssl
echo 'token,admin,admin,system:masters' > tokens
mkdir -p /root/.kube
cat > /root/.kube/config << 'END'
apiVersion: v1
kind: Config
clusters:
  - {name: local, cluster: {server: "https://127.0.0.1", insecure-skip-tls-verify: true}}
users: [{name: admin, user: {token: token}}]
contexts: [{name: admin, context: {cluster: local, user: admin}}]
current-context: admin
END
# Claims share devices, which is no default of this version.
features=DRAConsumableCapacity=true
# Pods reach the API server at the address of its service: no program makes services here.
ip address add 10.96.0.1/32 dev lo
kube-apiserver --etcd-servers http://127.0.0.1:2379 --cert-dir certs --token-auth-file tokens \
    --authorization-mode RBAC --allow-privileged --service-cluster-ip-range 10.96.0.0/16 \
    --advertise-address 192.0.2.1 --secure-port 443 --feature-gates $features \
    --kubelet-preferred-address-types InternalIP --service-account-key-file account.key \
    --service-account-signing-key-file account.key \
    --service-account-issuer https://kubernetes.default.svc > /var/log/apiserver 2>&1 &
server=$!
until kubectl get --raw /readyz > /dev/null 2>&1; do
    if ! kill -0 $server; then
        tail -n 20 /var/log/etcd /var/log/apiserver
        exit 1
    fi
    sleep 1
done
config=/root/.kube/config
kube-controller-manager --kubeconfig $config --leader-elect=false \
    --root-ca-file certs/apiserver.crt --service-account-private-key-file account.key > /var/log/controller-manager 2>&1 &
kube-scheduler --kubeconfig $config --leader-elect=false --feature-gates $features > /var/log/scheduler 2>&1 &

# Images are not removed and pods not evicted when the disk of this machine is nearly full.
cat > kubelet.yaml << 'END'
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard:
  {memory.available: 1Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}
imageGCHighThresholdPercent: 100
resolvConf: ""
END
# A kubelet that ends starts again, as its service would do.
while true; do
    kubelet --kubeconfig $config --config kubelet.yaml --hostname-override node \
        --node-ip 192.0.2.1 >> /var/log/kubelet 2>&1 || true
    sleep 1
done &
echo started
exec sleep infinity
