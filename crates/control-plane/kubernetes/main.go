// Command kubernetes is etcd and the control plane of Kubernetes in one program, for tests.
//
// One program is linked once where four would be linked four times. The first argument names the part
// to run, and the rest goes to it unchanged:
//
//	kubernetes etcd --data-dir …
//	kubernetes kube-apiserver --etcd-servers …
//	kubernetes helm-template CHART NAMESPACE
//	kubernetes kustomize-build FOLDER
//
// With EXIT_WITH_STDIN=1 the program ends when its standard input is closed, so that no part outlives
// the test that started it, however that test ends.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

// parts are the programs inside, by the name under which Kubernetes ships them.
var parts = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

// renderers print manifests, as the tools of their names do.
var renderers = map[string]func([]string) error{
	"helm-template":   helmTemplate,
	"kustomize-build": kustomizeBuild,
}

func exitWithStdin() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(3)
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: kubernetes etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|helm-template|kustomize-build [flags]")
		os.Exit(2)
	}
	if os.Getenv("EXIT_WITH_STDIN") == "1" {
		go exitWithStdin()
	}
	part := os.Args[1]
	os.Args = append([]string{part}, os.Args[2:]...)
	if render, known := renderers[part]; known {
		if err := render(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if part == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command, known := parts[part]
	if !known {
		fmt.Fprintf(os.Stderr, "kubernetes: no part named %q\n", part)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
