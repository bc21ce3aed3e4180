"""Baselines of other papers: scorers, allocators, and what calibrates them."""

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "policy": {
            "adakv": "arbor.papers.related.snapkv_budgets:ADAKV",
            "chunkkv": "arbor.papers.related.snapkv_budgets:CHUNKKV",
            "expected": "arbor.papers.related.expected_attention:POLICY",
            "keydiff": "arbor.papers.related.keys_values:KEYDIFF_POLICY",
            "pyramidkv": "arbor.papers.related.snapkv_budgets:PYRAMIDKV",
            "raas": "arbor.papers.related.received:RAAS_POLICY",
            "rkv": "arbor.papers.related.rkv:POLICY",
            "rpc": "arbor.papers.related.window_attention:POLICY",
            "thinkv": "arbor.papers.related.thinkv:POLICY",
            "thinkv-bits": "arbor.papers.related.thinkv_bits:POLICY",
            "tova": "arbor.papers.related.received:TOVA_POLICY",
            "triattention": "arbor.papers.related.triattention:POLICY",
            "vatp": "arbor.papers.related.keys_values:VATP_POLICY",
        },
        "allocator": {
            "chunks": "arbor.papers.related.snapkv_budgets:Chunks",
            "thinkv": "arbor.papers.related.thinkv:ThinKV",
            "thinkv-bits": "arbor.papers.related.thinkv_bits:ThinKVBits",
        },
        "scorer": {
            "expected": "arbor.papers.related.expected_attention:ExpectedAttention",
            "keydiff": "arbor.papers.related.keys_values:KeyDiff",
            "raas": "arbor.papers.related.received:RaaS",
            "rkv": "arbor.papers.related.rkv:RKV",
            "triattention": "arbor.papers.related.triattention:TriAttention",
            "vatp": "arbor.papers.related.keys_values:VATP",
            "window-attention": "arbor.papers.related.window_attention:WindowAttention",
        },
    },
    calibrations={
        "queries": (
            "arbor.papers.related.command:queries",
            "Average the queries that TriAttention scores with: solve problems, with everything kept.",
        ),
        "thoughts": (
            "arbor.papers.related.thoughts_command:thoughts",
            "Find the types of thoughts for ThinKV: solve problems, compare the sparsity of attention.",
        ),
    },
)
