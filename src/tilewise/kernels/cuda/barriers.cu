// Barriers in shared memory (compute capability 9.0) that count threads and bytes. A phase is over when all threads that
// it is for have arrived, and all bytes that they expect. Where kernels are emulated, others stand for these.

#ifndef EMULATED
__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(unsigned long long* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(unsigned long long* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier, unsigned parity) {
  asm volatile(
      "{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra over;\n"
      " bra again;\n over:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Where a barrier lies in another block of the cluster is told by ``cluster_address``. Four numbers are stored in that
// block's shared memory, and its barrier counts their sixteen bytes as arrived once they can be read there.
__device__ __forceinline__ void send_cluster(unsigned address, float4 a, unsigned barrier) {
  ON_CLUSTERS(asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(a.x), "f"(a.y), "f"(a.z), "f"(a.w), "r"(barrier) : "memory"));
}
#endif
