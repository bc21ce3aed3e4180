"""ArborKV (arXiv 2605.22106): tree-aware eviction by the values of blocks."""

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "policy": {
            "arborkv": "arbor.papers.arborkv.ratio:POLICY",
            "kkt": "arbor.papers.arborkv.kkt:POLICY",
        },
        "allocator": {
            "kkt": "arbor.papers.arborkv.kkt:KKT",
            "ratio": "arbor.papers.arborkv.ratio:Ratio",
        },
    },
    hooks={"msve": "arbor.papers.arborkv.msve:MSVE"},
    calibrations={
        "msve": (
            "arbor.papers.arborkv.command:msve",
            "Fit the block values of ArborKV (MSVE): solve problems, then drop each block in turn.",
        ),
    },
)
