// Matrix products of a warpgroup (compute capability 9.0, sm_90a) and what feeds them: barriers in shared memory, copies
// that report to them, registers that warps give to each other. Where kernels are emulated, others stand for these.
//
// Operands lie in shared memory without a swizzle: eight rows of eight fp16 numbers, 128 bytes in a row, are a core
// matrix. A descriptor says where the first one is, and how many bytes further on the next along K and along rows are.

#ifndef EMULATED
// ``bytes``, a multiple of 16, which the barrier is told of.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Four bytes, zeros unless ``wanted``; ``from`` is then not read.
__device__ __forceinline__ void copy_or_zero(float* to, const float* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(wanted ? 4 : 0)
               : "memory");
}

// Stores of the calling thread before this are seen by matrix units that it tells of them.
__device__ __forceinline__ void fence_for_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void units_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void units_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all products are done.
__device__ __forceinline__ void units_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <int COUNT> __device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// For ``threads`` threads that come to barrier ``number``, other than 0.
__device__ __forceinline__ void meet(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ unsigned two_halves(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ void from_halves(unsigned both, float& low, float& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(both));
}
// A number that is not computed or read again where it is needed.
__device__ __forceinline__ int kept(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
// Sums that products will set, and those that they have set after units_wait: the compiler may not move them across.
template <int COUNT> __device__ __forceinline__ void begin_sums(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "=f"(sums[i])::"memory");
}
template <int COUNT> __device__ __forceinline__ void keep_sums(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
#endif

__device__ __forceinline__ unsigned long long operand(unsigned address, unsigned along_depth, unsigned along_rows) {
  return (unsigned long long)(address >> 4 & 0x3fff) | (unsigned long long)(along_depth >> 4) << 16 |
         (unsigned long long)(along_rows >> 4) << 32;
}
