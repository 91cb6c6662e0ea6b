// Reads a machine as KubeVirt's own types have it, strictly: a field that they lack is an error.
package main

import (
	"fmt"
	"os"

	kubevirt "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

func main() {
	text, err := os.ReadFile(os.Args[1])
	if err == nil {
		err = yaml.UnmarshalStrict(text, &kubevirt.VirtualMachine{})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
