// Lints a chart with Helm's own packages, renders it with the values of a file, and reads monitors
// as the Prometheus operator's own types have them, strictly.
//
// Usage: helm CHART NAMESPACE OUT [VALUES]. Each file with objects goes into the folder OUT. The
// linter also compares the values with the schema of the chart.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

const release = "vgpu"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "helm:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 && len(args) != 4 {
		return errors.New("expected CHART, NAMESPACE, OUT and perhaps VALUES")
	}
	chart, namespace, out := args[0], args[1], args[2]
	// Each of the two removes what the values set to null.
	forLint, err := read(args[3:])
	if err != nil {
		return err
	}
	for _, message := range lint.RunAll(chart, forLint, namespace).Messages {
		if message.Severity >= support.WarningSev {
			return message
		}
	}
	values, err := read(args[3:])
	if err != nil {
		return err
	}
	files, err := render(chart, namespace, values)
	if err != nil {
		return err
	}
	for path, text := range files {
		name := filepath.Base(path)
		if strings.TrimSpace(text) == "" || strings.HasPrefix(name, "_") {
			continue
		}
		if err := checkMonitor(text); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := os.WriteFile(filepath.Join(out, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// The values of a file, or none.
func read(files []string) (map[string]any, error) {
	values := map[string]any{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if err := yaml.UnmarshalStrict(text, &values); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return values, nil
}

// The text of each file of the chart's folder of templates.
func render(folder, namespace string, values map[string]any) (map[string]string, error) {
	chart, err := loader.Load(folder)
	if err != nil {
		return nil, err
	}
	options := common.ReleaseOptions{
		Name:      release,
		Namespace: namespace,
		Revision:  1,
		IsInstall: true,
	}
	all, err := util.ToRenderValues(chart, values, options, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	return engine.Engine{Strict: true}.Render(chart, all)
}

// Kubernetes does not know these types: they belong to the Prometheus operator.
func checkMonitor(text string) error {
	for _, document := range strings.Split(text, "\n---\n") {
		var object struct {
			Kind string `json:"kind"`
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			continue // NOTES.txt
		}
		switch object.Kind {
		case "PodMonitor":
			return yaml.UnmarshalStrict([]byte(document), &monitoring.PodMonitor{})
		case "ServiceMonitor":
			return yaml.UnmarshalStrict([]byte(document), &monitoring.ServiceMonitor{})
		}
	}
	return nil
}
