// Spectra of filters, in the order in which the threads of depthwise1d_image.cu need them; depthwise1d.cu says how.

extern "C" __global__ void BOUNDS depthwise1d_filter(const Real* __restrict__ w, float2* __restrict__ spectra,
                                                     i64 channels, i64 w_channel, i64 w_step, i64 taps, double scale) {
  extern __shared__ float4 shared[];
  const int slot = threadIdx.x / T, t = threadIdx.x % T;
  float2* s = (float2*)shared + slot * SIGNAL;
  const Start from = start(blockIdx.x * (unsigned)SIGNALS + slot, channels, channels, 0, w_channel);
  to_rows<PAIRED_FIRST, APART_FIRST>(w + from.offset, {w_step, 0, 0, (int)taps}, t, T, s);
  RowPair r;
  rows_forward(s, Rows(t), r);
  if (!from.exists) return;
  float2* f = spectra + (i64)SPECTRUM * (blockIdx.x * (unsigned)SIGNALS + slot) + t;
  const float factor = 0.25f * (float)scale;  // twice the filter's spectra meet twice a signal's
  each_pair(t, [&](int i, int m, int at, float2) {
    float2 even, odd;
    halves(r[i], r[m], even, odd);
    f[2 * at * T] = scaled(factor, even);
    f[(2 * at + 1) * T] = scaled(factor, odd);
  });
}
