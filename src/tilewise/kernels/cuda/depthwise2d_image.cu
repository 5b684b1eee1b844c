// From planes through products with filters' spectra to planes; depthwise2d.cu says how. Images of a channel follow one
// another, so that a filter's spectrum stays in the cache.

template <int PART> __device__ __forceinline__ void edge_product(float2 (&r)[M2], const float2* f, const float2* g) {
#pragma unroll
  for (int i = 0; i <= M2 / 2; ++i) {
    const int m = mate<PART>(i);
    if (i > m) continue;
    float2 low, high;
    pair_product<(CORRELATE != 0)>(r[i], r[m], __ldg(f + i * ROW_THREADS), __ldg(g + i * SPLIT2), low, high);
    r[i] = low;
    if (m != i) r[m] = high;
  }
}

extern "C" __global__ void BOUNDS depthwise2d_image(const Real* __restrict__ x, const float2* __restrict__ spectra,
                                                    Result* __restrict__ y, i64 planes, i64 images, i64 x_channel,
                                                    i64 x_image, i64 x_row, i64 x_column, i64 y_channel, i64 y_image,
                                                    i64 y_row, i64 y_column) {
  extern __shared__ float4 shared[];
  float2* s = (float2*)shared;
  const unsigned first = blockIdx.x * (unsigned)PLANES;
  columns_forward<A>(x, {x_row, x_column},
                     [&](int slot) { return start(first + slot, planes, images, x_channel, x_image).offset; }, s);
  __syncthreads();
  if (row_warp()) {
    const Seat me = row_seat();
    float2* row = s + me.slot * PLANE + me.lane * PITCH;
    float2 r[M2];
    row_forward<A>(row, me.part, r);
    const float2* f = spectra + start(first + me.slot, planes, images, SPECTRUM, 0).offset;
    const float2* g = f + M2 * ROW_THREADS + me.part;
    f += me.lane * SPLIT2 + me.part;
    if (me.lane == 0) {
      if (SPLIT2 > 1 && me.part) edge_product<SPLIT2 - 1>(r, f, g);
      else edge_product<0>(r, f, g);
    } else {
#pragma unroll
      for (int i = 0; i < M2; ++i) {
        const float2 value = __ldg(f + i * ROW_THREADS);
        r[i] = times(r[i], CORRELATE ? conjugate(value) : value);
      }
    }
    row_inverse<C>(r, me, row);
  }
  __syncthreads();
  columns_inverse<C>(s, y, {y_row, y_column},
                     [&](int slot) { return start(first + slot, planes, images, y_channel, y_image); });
}
