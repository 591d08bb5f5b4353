package main

import (
	"fmt"
	"os"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// kustomizeBuild renders a folder with kustomize's own engine, as `kubectl kustomize FOLDER` does.
func kustomizeBuild(arguments []string) error {
	if len(arguments) != 1 {
		return fmt.Errorf("usage: kubernetes kustomize-build FOLDER")
	}
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), arguments[0])
	if err != nil {
		return err
	}
	text, err := resources.AsYaml()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(text)
	return err
}
