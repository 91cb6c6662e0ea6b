// Builds an overlay of a base with kustomize's own packages. The overlay names another image, as
// that of a cluster does.
//
// Usage: kustomize BASE IMAGE REPOSITORY TAG OUT. Each object goes into the folder OUT, as
// NAME.yaml.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kustomize:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 5 {
		return errors.New("expected BASE, IMAGE, REPOSITORY, TAG and OUT")
	}
	base, image, repository, tag, out := args[0], args[1], args[2], args[3], args[4]
	overlay, err := os.MkdirTemp("", "vgpu-kustomize-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(overlay)
	// An overlay names its base by a relative path.
	overlay, err = filepath.EvalSymlinks(overlay)
	if err != nil {
		return err
	}
	relative, err := filepath.Rel(overlay, base)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("resources: [%q]\nimages: [{name: %q, newName: %q, newTag: %q}]\n",
		relative, image, repository, tag)
	file := filepath.Join(overlay, "kustomization.yaml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return err
	}
	kustomizer := krusty.MakeKustomizer(krusty.MakeDefaultOptions())
	objects, err := kustomizer.Run(filesys.MakeFsOnDisk(), overlay)
	if err != nil {
		return err
	}
	for _, object := range objects.Resources() {
		text, err := object.AsYAML()
		if err != nil {
			return err
		}
		file := filepath.Join(out, object.GetName()+".yaml")
		if err := os.WriteFile(file, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
