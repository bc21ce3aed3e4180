// Which of the kernels compiled for this machine its CPU can run.
#pragma once

#include "native.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

using arbor::Kernels;

#if defined(__x86_64__)

const Kernels* const FROM_BEST[] = {&arbor::amx_kernels, &arbor::avx512_bf16_kernels,
                                    &arbor::avx512_vnni_kernels, &arbor::avx512_kernels,
                                    &arbor::avx_vnni_kernels, &arbor::avx2_kernels};

inline void pause_briefly() { __builtin_ia32_pause(); }

#if defined(ARBOR_EMULATED)

bool runs_here(const Kernels&) { return true; }

#else

// Whether the operating system lets this process use the tiles of AMX.
bool tiles_allowed() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

struct Leaf {
    unsigned a, b, c, d;
};

// What cpuid says; __builtin_cpu_supports of GCC 12 does not know AVX-VNNI and AMX.
Leaf cpu_leaf(unsigned subject, unsigned part) {
    Leaf leaf = {subject, 0, part, 0};
    __asm__("cpuid" : "+a"(leaf.a), "=b"(leaf.b), "+c"(leaf.c), "=d"(leaf.d));
    return leaf;
}

bool runs_here(const Kernels& kernels) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
    if (&kernels == &arbor::avx2_kernels) return true;
    if (&kernels == &arbor::avx_vnni_kernels) return cpu_leaf(7, 0).a >= 1 && (cpu_leaf(7, 1).a >> 4 & 1);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
        return false;
    }
    if (&kernels == &arbor::avx512_kernels) return true;
    if (&kernels == &arbor::avx512_vnni_kernels) return __builtin_cpu_supports("avx512vnni");
    if (!__builtin_cpu_supports("avx512bf16")) return false;
    if (&kernels == &arbor::avx512_bf16_kernels) return true;
    if (!__builtin_cpu_supports("avx512vnni")) return false;
    unsigned d = cpu_leaf(7, 0).d;
    return (d >> 22 & 1) && (d >> 24 & 1) && tiles_allowed();
}

#endif

#elif defined(__aarch64__)

const Kernels* const FROM_BEST[] = {&arbor::neon_bf16_kernels, &arbor::neon_dot_kernels, &arbor::neon_kernels};

inline void pause_briefly() { __asm__ volatile("yield"); }

#if defined(__APPLE__)
bool has(const char* feature) {
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found;
}
bool has_dots() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_bfloat16() { return has("hw.optional.arm.FEAT_BF16"); }
#elif defined(__linux__)
// HWCAP_ASIMDDP and HWCAP2_BF16, which older headers lack
bool has_dots() { return getauxval(AT_HWCAP) & 1 << 20; }
bool has_bfloat16() { return getauxval(AT_HWCAP2) & 1 << 14; }
#else
bool has_dots() { return false; }
bool has_bfloat16() { return false; }
#endif

// NEON is part of aarch64, its dot products of bytes of most CPUs since Armv8.2, its products of
// bfloat16 since Armv8.6.
bool runs_here(const Kernels& kernels) {
    if (&kernels == &arbor::neon_kernels) return true;
    return has_dots() && (&kernels == &arbor::neon_dot_kernels || has_bfloat16());
}

#endif

}  // namespace
