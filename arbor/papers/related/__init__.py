"""Baselines of other papers: scorers, allocators, and what calibrates them."""

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "policy": {
            "adakv": "arbor.papers.related.per_head:ADAKV",
            "chunkkv": "arbor.papers.related.chunks:POLICY",
            "expected": "arbor.papers.related.expected_attention:POLICY",
            "keydiff": "arbor.papers.related.keydiff:POLICY",
            "pyramidkv": "arbor.papers.related.per_head:PYRAMIDKV",
            "raas": "arbor.papers.related.raas:POLICY",
            "rkv": "arbor.papers.related.rkv:POLICY",
            "rpc": "arbor.papers.related.window_attention:POLICY",
            "thinkv": "arbor.papers.related.thinkv:POLICY",
            "tova": "arbor.papers.related.tova:POLICY",
            "triattention": "arbor.papers.related.triattention:POLICY",
            "vatp": "arbor.papers.related.vatp:POLICY",
        },
        "allocator": {
            "chunks": "arbor.papers.related.chunks:Chunks",
            "thinkv": "arbor.papers.related.thinkv:ThinKV",
        },
        "scorer": {
            "expected": "arbor.papers.related.expected_attention:ExpectedAttention",
            "keydiff": "arbor.papers.related.keydiff:KeyDiff",
            "raas": "arbor.papers.related.raas:RaaS",
            "rkv": "arbor.papers.related.rkv:RKV",
            "tova": "arbor.papers.related.tova:TOVA",
            "triattention": "arbor.papers.related.triattention:TriAttention",
            "vatp": "arbor.papers.related.vatp:VATP",
            "window-attention": "arbor.papers.related.window_attention:WindowAttention",
        },
    },
    calibrations={
        "queries": (
            "arbor.papers.related.command:queries",
            "Average the queries that TriAttention scores with: solve problems, with everything kept.",
        ),
    },
)
