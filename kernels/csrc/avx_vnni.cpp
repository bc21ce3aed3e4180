// Products of bfloat16 and the codes of blocks; all else is as with AVX2.
#include "block_linear.h"

namespace {

void codes_linear(const LinearJob& job, int32_t part, int32_t parts, arbor::Scratch* scratch) {
    bool codes = job.packed_number >= arbor::BLOCKS;
    (codes ? block_linear : arbor::avx2_kernels.linear)(job, part, parts, scratch);
}

arbor::Kernels over_avx2() {
    arbor::Kernels kernels = arbor::avx2_kernels;  // which is there before any code runs
    kernels.name = "avx_vnni";
    kernels.linear = codes_linear;
    return kernels;
}

}  // namespace

const arbor::Kernels arbor::avx_vnni_kernels = over_avx2();
