"""One measurement of scipy or OR-tools: prints a line of JSON. Only the solving is measured."""

import json
import resource
import sys
import time

import numpy as np


def main() -> None:
    solver, rows, cols, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    weights = np.fromfile(path, dtype=np.float32).reshape(rows, cols)
    if solver == "scipy":
        from scipy.optimize import linear_sum_assignment

        before = time.process_time()
        left, right = linear_sum_assignment(weights, maximize=True)
        cpu_s = time.process_time() - before
        value = float(weights[left, right].astype(np.float64).sum())
    else:
        from ortools.graph.python import linear_sum_assignment

        assignment = linear_sum_assignment.SimpleLinearSumAssignment()
        cost = (weights.astype(np.float64) * -(2.0**24)).astype(np.int64).ravel()
        left = np.repeat(np.arange(rows, dtype=np.int32), cols)
        right = np.tile(np.arange(cols, dtype=np.int32), rows)
        assignment.add_arcs_with_cost(left, right, cost)
        before = time.process_time()
        assignment.solve()
        cpu_s = time.process_time() - before
        value = -assignment.optimal_cost() / 2.0**24
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu_s": cpu_s, "value": value, "peak_bytes": peak}))


main()
