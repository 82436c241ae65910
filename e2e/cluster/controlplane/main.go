// Command controlplane runs one component of a Kubernetes control plane: etcd, kube-apiserver,
// kube-controller-manager or kube-scheduler. The parent (e2e/cluster) starts it once per component.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// components maps a component's name to its upstream command. etcd has a main of its own and is not here.
var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": manager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: controlplane etcd|kube-apiserver|kube-controller-manager|kube-scheduler [flags]")
		os.Exit(2)
	}
	name, args := os.Args[1], append([]string{os.Args[1]}, os.Args[2:]...)
	if name == "etcd" {
		etcdmain.Main(args)
		return
	}
	component, known := components[name]
	if !known {
		fmt.Fprintf(os.Stderr, "controlplane: unknown component %q\n", name)
		os.Exit(2)
	}
	os.Args = args
	os.Exit(cli.Run(component()))
}
