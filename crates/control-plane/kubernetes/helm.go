package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

// helmTemplate renders a chart with Helm's own engine, as `helm template muxflow CHART -n NAMESPACE -f VALUES` does, without the
// definitions in crds/.
func helmTemplate(arguments []string) error {
	if len(arguments) < 2 {
		return fmt.Errorf("usage: kubernetes helm-template CHART NAMESPACE [VALUES.yaml]")
	}
	chart, err := loader.Load(arguments[0])
	if err != nil {
		return err
	}
	if err := chart.Validate(); err != nil {
		return err
	}
	values := chartutil.Values{}
	if len(arguments) > 2 {
		if values, err = chartutil.ReadValuesFile(arguments[2]); err != nil {
			return err
		}
	}
	release := chartutil.ReleaseOptions{Name: "muxflow", Namespace: arguments[1], Revision: 1, IsInstall: true}
	// Checks the values against values.schema.json too.
	all, err := chartutil.ToRenderValues(chart, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		text := strings.TrimSpace(files[name])
		if text != "" && strings.HasSuffix(name, ".yaml") {
			fmt.Fprintf(os.Stdout, "---\n%s\n", strings.TrimPrefix(text, "---\n"))
		}
	}
	return nil
}
