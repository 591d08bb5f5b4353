package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"runtime"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

// kubernetesNamespace is where the kubelet's images are looked for.
const kubernetesNamespace = "k8s.io"

// putImage makes an image of one layer from a folder and gives it to a daemon.
func putImage(address, name, folder string) error {
	image, err := archive(name, folder)
	if err != nil {
		return err
	}
	daemon, err := client.New(address)
	if err != nil {
		return err
	}
	defer daemon.Close()
	ctx := namespaces.WithNamespace(context.Background(), kubernetesNamespace)
	_, err = daemon.Import(ctx, bytes.NewReader(image))
	return err
}

// archive is what `docker save` would write.
func archive(name, folder string) ([]byte, error) {
	var layer bytes.Buffer
	writer := tar.NewWriter(&layer)
	if err := writer.AddFS(os.DirFS(folder)); err != nil {
		return nil, err
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           runtime.GOOS,
		"config":       map[string]any{"Entrypoint": []string{"/pause"}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer.Bytes())}},
	})
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return nil, err
	}
	var image bytes.Buffer
	writer = tar.NewWriter(&image)
	files := []struct {
		name string
		data []byte
	}{{"config.json", config}, {"layer.tar", layer.Bytes()}, {"manifest.json", manifest}}
	for _, file := range files {
		header := tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.data))}
		if err := writer.WriteHeader(&header); err != nil {
			return nil, err
		}
		if _, err := writer.Write(file.data); err != nil {
			return nil, err
		}
	}
	return image.Bytes(), writer.Close()
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
