"""RKSC (arXiv 2606.09937): verify less, share similar prompts, keep blocks by value and depth."""

from __future__ import annotations

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "allocator": {"rsbcm": "arbor.papers.rksc.rsbcm:RSBCM"},
        "policy": {"rsbcm": "arbor.papers.rksc.rsbcm:POLICY"},
        "verifier": {"cgee": "arbor.papers.rksc.cgee:CGEE"},
    },
    hooks={
        "branch_stop": "arbor.papers.rksc.branch_stop:BranchStop.parse",
        "kv_probe": "arbor.papers.rksc.kv_probe:level_rule",
        "share": "arbor.papers.rksc.similar_prompts:SimilarPrompts",
    },
    calibrations={
        "exit": (
            "arbor.papers.rksc.calibrate_command:calibrate_exit",
            "Choose the thresholds of CGEE: solve problems with full verification, then compare.",
        ),
    },
)
