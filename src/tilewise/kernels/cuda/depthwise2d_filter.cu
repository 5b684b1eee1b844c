// Spectra of filters, in the order in which the threads of depthwise2d_image.cu hold a plane's; depthwise2d.cu says how.
// Each ``inner`` of them lie ``w_inner`` apart, those ``w_outer``.

template <int PART> __device__ __forceinline__ void put_edge(const float2 (&r)[M2], float factor, float2* f, float2* g) {
#pragma unroll
  for (int i = 0; i <= M2 / 2; ++i) {
    if (i > mate<PART>(i)) continue;
    float2 sum, rest;
    halves(r[i], r[mate<PART>(i)], sum, rest);
    f[i * ROW_THREADS] = scaled(factor, sum);
    g[i * SPLIT2] = scaled(factor, rest);
  }
}

extern "C" __global__ void BOUNDS depthwise2d_filter(const Real* __restrict__ w, float2* __restrict__ spectra,
                                                     i64 filters, i64 inner, i64 w_outer, i64 w_inner, i64 w_row,
                                                     i64 w_column, double scale) {
  extern __shared__ float4 shared[];
  float2* s = (float2*)shared;
  const unsigned first = blockIdx.x * (unsigned)PLANES;
  columns_forward<A>(w, {w_row, w_column},
                     [&](int slot) { return start(first + slot, filters, inner, w_outer, w_inner).offset; }, s);
  __syncthreads();
  const Seat me = row_seat();
  if (!me.works) return;
  float2 r[M2];
  row_forward<A>(s + me.slot * PLANE + me.lane * PITCH, me.part, r);
  const Start to = start(first + me.slot, filters, filters, 0, SPECTRUM);
  if (!to.exists) return;
  float2* f = spectra + to.offset + me.lane * SPLIT2 + me.part;
  if (me.lane == 0) {
    float2* g = spectra + to.offset + M2 * ROW_THREADS + me.part;
    if (SPLIT2 > 1 && me.part) put_edge<SPLIT2 - 1>(r, (float)scale, f, g);
    else put_edge<0>(r, (float)scale, f, g);
  } else {
    const float factor = 0.25f * (float)scale;  // twice the filter's frequencies meet twice an image's
#pragma unroll
    for (int i = 0; i < M2; ++i) f[i * ROW_THREADS] = scaled(factor, r[i]);
  }
}
