// Stands in for the kubelet with Kubernetes' own package of the services for device plugins, and
// connects to a device plugin as the kubelet does.
//
// Usage: kubelet FOLDER MEMORY WEIGHT, with a folder in place of /var/lib/kubelet. The program
// waits for the three resources of the device plugin, gives a container a seat, MEMORY slices and
// WEIGHT weights, and prints what the container gets, as JSON. The pod ends at SIGUSR1.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugins "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	resources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	seat    = "vgpu.dev/gpu"
	memory  = "vgpu.dev/memory"
	weight  = "vgpu.dev/weight"
	timeout = 60 * time.Second
)

// A device plugin that has registered.
type plugin struct {
	client plugins.DevicePluginClient
	// Whether the plugin is asked which devices it prefers.
	prefers bool
	devices []*plugins.Device
}

type kubelet struct {
	plugins.UnimplementedRegistrationServer
	resources.UnimplementedPodResourcesListerServer
	folder  string
	mutex   sync.Mutex
	plugins map[string]*plugin
	pods    []*resources.PodResources
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kubelet:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 {
		return errors.New("expected FOLDER, MEMORY and WEIGHT")
	}
	wanted := map[string]int{seat: 1}
	for at, resource := range []string{memory, weight} {
		count, err := strconv.Atoi(args[at+1])
		if err != nil {
			return err
		}
		wanted[resource] = count
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGUSR1)
	k := &kubelet{
		folder:  filepath.Join(args[0], "device-plugins"),
		plugins: map[string]*plugin{},
		pods:    []*resources.PodResources{{Name: "own", Namespace: "kube-system"}},
	}
	if err := k.serve(args[0]); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	response, err := k.start(ctx, wanted)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(response); err != nil {
		return err
	}
	<-ended
	k.mutex.Lock()
	k.pods = k.pods[:1]
	k.mutex.Unlock()
	// Whoever has started this program ends it.
	select {}
}

// Listens at both sockets.
func (k *kubelet) serve(folder string) error {
	for _, name := range []string{"device-plugins", "pod-resources"} {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		listener, err := net.Listen("unix", filepath.Join(path, "kubelet.sock"))
		if err != nil {
			return err
		}
		server := grpc.NewServer()
		if name == "device-plugins" {
			plugins.RegisterRegistrationServer(server, k)
		} else {
			resources.RegisterPodResourcesListerServer(server, k)
		}
		go func() {
			fmt.Fprintln(os.Stderr, "kubelet:", server.Serve(listener))
		}()
	}
	return nil
}

// Register connects to the device plugin before it answers.
func (k *kubelet) Register(
	ctx context.Context, request *plugins.RegisterRequest,
) (*plugins.Empty, error) {
	if !slices.Contains(plugins.SupportedVersions[:], request.Version) {
		return nil, fmt.Errorf("version %q is not supported", request.Version)
	}
	if !slices.Contains([]string{seat, memory, weight}, request.ResourceName) {
		return nil, fmt.Errorf("resource %q is not expected", request.ResourceName)
	}
	connection, err := grpc.NewClient(
		"passthrough:///"+filepath.Join(k.folder, request.Endpoint),
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
	)
	if err != nil {
		return nil, err
	}
	client := plugins.NewDevicePluginClient(connection)
	options, err := client.GetDevicePluginOptions(ctx, &plugins.Empty{})
	if err != nil {
		return nil, err
	}
	if !options.PreStartRequired {
		return nil, errors.New("the plugin does not ask for PreStartContainer")
	}
	stream, err := client.ListAndWatch(context.Background(), &plugins.Empty{})
	if err != nil {
		return nil, err
	}
	known := &plugin{client: client, prefers: options.GetPreferredAllocationAvailable}
	k.mutex.Lock()
	k.plugins[request.ResourceName] = known
	k.mutex.Unlock()
	go func() {
		for {
			list, err := stream.Recv()
			k.mutex.Lock()
			known.devices = list.GetDevices()
			k.mutex.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return &plugins.Empty{}, nil
}

// List says which container has which devices.
func (k *kubelet) List(
	context.Context, *resources.ListPodResourcesRequest,
) (*resources.ListPodResourcesResponse, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return &resources.ListPodResourcesResponse{PodResources: slices.Clone(k.pods)}, nil
}

// Gives a container its devices, and starts it.
func (k *kubelet) start(
	ctx context.Context, wanted map[string]int,
) (*plugins.ContainerAllocateResponse, error) {
	clients := map[string]plugins.DevicePluginClient{}
	ids := map[string][]string{}
	var response *plugins.ContainerAllocateResponse
	for resource, count := range wanted {
		known, free, err := k.healthy(ctx, resource, count)
		if err != nil {
			return nil, err
		}
		client := known.client
		if known.prefers {
			free, err = preferred(ctx, client, free, count)
			if err != nil {
				return nil, err
			}
		}
		clients[resource], ids[resource] = client, free[:count]
		request := &plugins.ContainerAllocateRequest{DevicesIds: ids[resource]}
		answer, err := client.Allocate(ctx, &plugins.AllocateRequest{
			ContainerRequests: []*plugins.ContainerAllocateRequest{request},
		})
		if err != nil {
			return nil, err
		}
		if len(answer.ContainerResponses) != 1 {
			return nil, fmt.Errorf("%d responses for a container", len(answer.ContainerResponses))
		}
		if resource == seat {
			response = answer.ContainerResponses[0]
		}
	}
	container := &resources.ContainerResources{Name: "llama"}
	for name, devices := range ids {
		container.Devices = append(container.Devices, &resources.ContainerDevices{
			ResourceName: name, DeviceIds: devices,
		})
	}
	k.mutex.Lock()
	k.pods = append(k.pods, &resources.PodResources{
		Name: "pod", Namespace: "default",
		Containers: []*resources.ContainerResources{container},
	})
	k.mutex.Unlock()
	for resource, client := range clients {
		request := &plugins.PreStartContainerRequest{DevicesIds: ids[resource]}
		if _, err := client.PreStartContainer(ctx, request); err != nil {
			return nil, err
		}
	}
	return response, nil
}

// The devices that the plugin prefers among those that are free.
func preferred(
	ctx context.Context, client plugins.DevicePluginClient, free []string, count int,
) ([]string, error) {
	request := &plugins.ContainerPreferredAllocationRequest{
		AvailableDeviceIDs: free,
		AllocationSize:     int32(count),
	}
	answer, err := client.GetPreferredAllocation(ctx, &plugins.PreferredAllocationRequest{
		ContainerRequests: []*plugins.ContainerPreferredAllocationRequest{request},
	})
	if err != nil {
		return nil, err
	}
	if len(answer.ContainerResponses) != 1 {
		return nil, fmt.Errorf("%d preferences of a container", len(answer.ContainerResponses))
	}
	chosen := answer.ContainerResponses[0].DeviceIDs
	if len(chosen) != count {
		return nil, fmt.Errorf("%d devices are preferred in place of %d", len(chosen), count)
	}
	return chosen, nil
}

// Waits for healthy devices of a resource.
func (k *kubelet) healthy(
	ctx context.Context, resource string, count int,
) (*plugin, []string, error) {
	for {
		k.mutex.Lock()
		known := k.plugins[resource]
		var ids []string
		if known != nil {
			for _, device := range known.devices {
				if device.Health == plugins.Healthy {
					ids = append(ids, device.ID)
				}
			}
		}
		k.mutex.Unlock()
		if len(ids) >= count {
			return known, ids, nil
		}
		select {
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("%d of %d devices %s", len(ids), count, resource)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
