"""Asks functions of SciPy and scikit-learn with arrays of a device, and with NumPy's, and compares.

    python tests/interop/array_api_callers.py [--record FILE] [NAME...]

prints a JSON document. For each function it has the outcome: "device" (computed only by functions of the
namespace), "partly" (some of it by NumPy, from copies on the host), "host" (the result is NumPy's), or the
error. ``--record`` replaces the record of the same backend by it, with the date and the versions; the pages
show ``docs/array_api_callers.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

# They read it when they are imported, so that this module imports them later.
os.environ["SCIPY_ARRAY_API"] = "1"
sys.path[:0] = [str(Path(__file__).parents[1])]

Call = Callable[[Any], Any]
# How a function of many is called, with arrays by their names.
ASKED: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    (
        "scipy.special",
        "digamma entr erf erfc expit gamma gammaln i0 i0e i1 i1e j0 j1 log_ndtr ndtr sinc",
        lambda f, d: f(d.x),
    ),
    ("scipy.special", "logit ndtri", lambda f, d: f(d.x / 2)),
    (
        "scipy.special",
        "gammainc gammaincc kl_div rel_entr chdtr chdtrc stdtr xlogy xlog1py",
        lambda f, d: f(d.x, d.y),
    ),
    ("scipy.special", "logsumexp softmax log_softmax", lambda f, d: f(d.table, axis=1)),
    ("scipy.special", "betainc", lambda f, d: f(d.x, d.y, d.x / 2)),
    ("scipy.special", "multigammaln", lambda f, d: f(d.x + 3, 2)),
    ("scipy.special", "zeta", lambda f, d: f(d.x + 2, d.y)),
    (
        "scipy.stats",
        (
            "circmean circstd circvar describe differential_entropy directional_stats entropy gmean gstd "
            "gzscore hmean iqr jarque_bera kstat kstatvar kurtosis kurtosistest lmoment median_abs_deviation "
            "mode normaltest rankdata sem skew skewtest tmax tmean tmin tsem tstd tvar variation zscore"
        ),
        lambda f, d: f(d.table),
    ),
    ("scipy.stats", "boxcox_llf", lambda f, d: f(0.5, d.x)),
    ("scipy.stats", "moment", lambda f, d: f(d.table, order=2)),
    ("scipy.stats", "pmean", lambda f, d: f(d.table, 2)),
    ("scipy.stats", "quantile", lambda f, d: f(d.table, 0.3)),
    ("scipy.stats", "trim_mean", lambda f, d: f(d.table, 0.1)),
    ("scipy.stats", "ttest_1samp", lambda f, d: f(d.x, 0.5)),
    ("scipy.stats", "friedmanchisquare", lambda f, d: f(d.x, d.y, d.x * d.y)),
    ("scipy.stats", "chisquare power_divergence sigmaclip", lambda f, d: f(d.x)),
    ("scipy.stats", "combine_pvalues false_discovery_control", lambda f, d: f(d.x / 2)),
    (
        "scipy.stats",
        (
            "alexandergovern ansari bartlett brunnermunzel cramervonmises_2samp epps_singleton_2samp "
            "f_oneway fligner kruskal levene mannwhitneyu mood pearsonr pointbiserialr ttest_ind ttest_rel "
            "wilcoxon zmap"
        ),
        lambda f, d: f(d.x, d.y),
    ),
    ("scipy.cluster.vq", "whiten", lambda f, d: f(d.points)),
    ("scipy.cluster.vq", "kmeans vq", lambda f, d: f(d.points, d.points[:3, :])),
    ("scipy.cluster.vq", "kmeans2", lambda f, d: f(d.points, d.points[:3, :], minit="matrix")),
    (
        "scipy.cluster.hierarchy",
        "average centroid complete linkage median single ward weighted",
        lambda f, d: f(d.points),
    ),
    (
        "scipy.cluster.hierarchy",
        (
            "cophenet inconsistent is_monotonic is_valid_linkage leaves_list maxdists num_obs_linkage "
            "to_mlab_linkage"
        ),
        lambda f, d: f(d.links),
    ),
    ("scipy.cluster.hierarchy", "fcluster", lambda f, d: f(d.links, 0.5, "distance")),
    ("scipy.cluster.hierarchy", "fclusterdata", lambda f, d: f(d.points, 0.5)),
    ("sklearn.preprocessing", "LabelBinarizer LabelEncoder", lambda f, d: f().fit_transform(d.classes)),
    ("sklearn.preprocessing", "KernelCenterer", lambda f, d: f().fit_transform(d.samples[:5, :])),
    (
        "sklearn.preprocessing",
        "Binarizer MaxAbsScaler MinMaxScaler Normalizer PolynomialFeatures StandardScaler",
        lambda f, d: f().fit_transform(d.samples),
    ),
    ("sklearn.linear_model", "RidgeCV", lambda f, d: f().fit(d.samples, d.targets).predict(d.samples)),
    (
        "sklearn.linear_model",
        "LogisticRegression PoissonRegressor RidgeClassifierCV",
        lambda f, d: f().fit(d.samples, d.classes).predict(d.samples),
    ),
    (
        "sklearn.linear_model",
        "Ridge RidgeClassifier",
        lambda f, d: f(solver="svd").fit(d.samples, d.classes).predict(d.samples),
    ),
    (
        "sklearn.discriminant_analysis",
        "LinearDiscriminantAnalysis",
        lambda f, d: f().fit(d.samples, d.classes).predict_proba(d.samples),
    ),
    (
        "sklearn.naive_bayes",
        "GaussianNB",
        lambda f, d: f().fit(d.samples, d.classes).predict_proba(d.samples),
    ),
    (
        "sklearn.mixture",
        "GaussianMixture",
        lambda f, d: f(2, init_params="random", random_state=0).fit(d.samples).predict_proba(d.samples),
    ),
    (
        "sklearn.kernel_approximation",
        "Nystroem",
        lambda f, d: f(n_components=5, random_state=0).fit_transform(d.samples),
    ),
    # The signs of the components are free.
    (
        "sklearn.decomposition",
        "PCA",
        lambda f, d: [
            abs(
                f(2, svd_solver=solver, power_iteration_normalizer="QR", random_state=0).fit_transform(
                    d.samples
                )
            )
            for solver in ("full", "covariance_eigh", "randomized")
        ],
    ),
    ("sklearn.model_selection", "train_test_split", lambda f, d: f(d.samples, random_state=0)),
    (
        "sklearn.model_selection",
        "cross_val_predict",
        lambda f, d: f(import_module("sklearn.linear_model").Ridge(solver="svd"), d.samples, d.targets, cv=3),
    ),
    (
        "sklearn.model_selection",
        "GridSearchCV",
        lambda f, d: (
            f(import_module("sklearn.linear_model").Ridge(solver="svd"), {"alpha": [0.1, 1.0]}, cv=3)
            .fit(d.samples, d.targets)
            .predict(d.samples)
        ),
    ),
    (
        "sklearn.metrics",
        (
            "accuracy_score balanced_accuracy_score cohen_kappa_score confusion_matrix f1_score hamming_loss "
            "jaccard_score multilabel_confusion_matrix precision_recall_fscore_support precision_score "
            "recall_score zero_one_loss"
        ),
        lambda f, d: f(d.classes, d.guesses),
    ),
    ("sklearn.metrics", "fbeta_score", lambda f, d: f(d.classes, d.guesses, beta=2.0)),
    (
        "sklearn.metrics",
        (
            "d2_absolute_error_score d2_pinball_score d2_tweedie_score explained_variance_score max_error "
            "mean_absolute_error mean_absolute_percentage_error mean_gamma_deviance mean_pinball_loss "
            "mean_poisson_deviance mean_squared_error mean_squared_log_error mean_tweedie_deviance "
            "median_absolute_error r2_score root_mean_squared_error root_mean_squared_log_error"
        ),
        lambda f, d: f(d.targets, d.numbers),
    ),
    (
        "sklearn.metrics",
        (
            "average_precision_score brier_score_loss d2_brier_score det_curve log_loss "
            "precision_recall_curve roc_auc_score roc_curve"
        ),
        lambda f, d: f(d.classes, d.chances),
    ),
    (
        "sklearn.metrics.pairwise",
        (
            "additive_chi2_kernel chi2_kernel cosine_distances cosine_similarity euclidean_distances "
            "laplacian_kernel linear_kernel manhattan_distances paired_cosine_distances "
            "paired_euclidean_distances pairwise_distances polynomial_kernel rbf_kernel sigmoid_kernel"
        ),
        lambda f, d: f(abs(d.samples), abs(d.samples) + 0.5),
    ),
)


def calls_of(library: str) -> dict[str, Call]:
    """Return the functions of a library, by their names in it; none where it is not installed."""
    calls: dict[str, Call] = {}
    for module, names, how in ASKED:
        if module.partition(".")[0] == library and find_spec(library) is not None:
            for name in names.split():
                calls[f"{module}.{name}"] = partial(how, getattr(import_module(module), name))
    return dict(sorted(calls.items()))


def arrays() -> dict[str, Any]:
    """Return what the functions are asked with."""
    rng = np.random.default_rng(0)
    x, y, points = rng.random(20) + 0.1, rng.random(20) + 0.2, rng.random((12, 3))
    samples = rng.normal(size=(60, 5))
    return {
        "x": x,
        "y": y,
        "points": points,
        "table": np.abs(rng.normal(size=(30, 4))) + 0.1,
        "links": import_module("scipy.cluster.hierarchy").linkage(points),
        "samples": samples,
        "classes": (samples[:, 0] + 0.3 * rng.normal(size=60) > 0).astype(np.int64),
        "guesses": (samples[:, 1] > 0).astype(np.int64),
        "targets": np.abs(samples @ np.arange(5.0)) + 1,
        "numbers": np.abs(samples[:, 0]) + 1,
        "chances": 1 / (1 + np.exp(-samples[:, 0])),
    }


class Space:
    """The namespace of a device, and how many copies to the host NumPy has asked for."""

    def __init__(self) -> None:
        from array_api_module import xp

        from trio_accel.interop import Array

        self.xp = xp
        self.array = Array
        self.copies = 0
        copy = Array.__array__

        def counted(array: Array, *args: Any, **kwargs: Any) -> Any:
            self.copies += 1
            return copy(array, *args, **kwargs)

        setattr(Array, "__array__", counted)  # noqa: B010  # it is not meant to be replaced

    def parts(self, result: Any) -> list[Any]:
        """Return the arrays and numbers of a result: one, several, or an object with them."""
        if isinstance(result, (tuple, list)):
            return [part for one in result for part in self.parts(one)]
        if isinstance(result, (self.array, np.ndarray, np.generic, int, float, complex)):
            return [result]
        public = [getattr(result, name) for name in sorted(vars(result)) if name[0] != "_"]
        return [part for one in public for part in self.parts(one)]

    def outcome_of(self, call: Call, given: dict[str, Any]) -> str:
        """Ask with NumPy's arrays and with a device's, and return where the second was computed."""
        wanted = self.parts(call(SimpleNamespace(**given)))
        on_device = {name: self.xp.asarray(array) for name, array in given.items()}
        self.copies = 0
        try:
            found = self.parts(call(SimpleNamespace(**on_device)))
        except Exception as error:  # noqa: BLE001  # of another library; it is what is recorded
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        copies = self.copies
        for want, part in zip(wanted, found, strict=True):
            np.testing.assert_allclose(np.asarray(part), want, rtol=1e-6, atol=1e-8)
        if any(isinstance(part, (np.ndarray, np.generic)) for part in found):
            return "host"
        return "partly" if copies else "device"


def main() -> None:
    """Ask the requests of the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, default=None)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    space, given = Space(), arrays()
    outcomes: dict[str, str] = {}
    versions = {"Python": platform.python_version()}
    for library, distribution in (("scipy", "scipy"), ("sklearn", "scikit-learn")):
        calls = calls_of(library)
        if not calls:
            continue
        versions[distribution] = metadata.version(distribution)
        dispatch: Any = nullcontext()
        if library == "sklearn":
            dispatch = import_module("sklearn").config_context(array_api_dispatch=True)
        with dispatch:
            chosen = {name: call for name, call in calls.items() if not asked.names or name in asked.names}
            outcomes |= {name: space.outcome_of(call, given) for name, call in chosen.items()}
    sys.stdout.write(json.dumps(outcomes, indent=1) + "\n")
    if asked.record is not None:
        backend = space.xp.__array_namespace_info__().default_device().info.backend
        records = json.loads(asked.record.read_text(encoding="utf-8")) if asked.record.exists() else {}
        records[backend] = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions,
            "outcomes": outcomes,
        }
        asked.record.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
