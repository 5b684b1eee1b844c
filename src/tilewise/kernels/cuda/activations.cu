// A problem's activation of a number in fp32, where NaN stays NaN. ACTIVATION is its place in ``activations.py``, and its
// parameters have the bits FIRST and SECOND. Both forms of GELU are those of Hendrycks and Gimpel 2016, section 2.

__device__ __forceinline__ float cut(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float activated(float x) {
  const float first = float_of(FIRST), second = float_of(SECOND);
  if constexpr (ACTIVATION == RELU) return x < 0.f ? 0.f : x;
  if constexpr (ACTIVATION == GELU) return .5f * x * (1.f + erff(x * .7071067811865476f));
  if constexpr (ACTIVATION == GELU_TANH) return x * sigmoid_of(1.5957691216057308f * (x + .044715f * x * x * x));
  if constexpr (ACTIVATION == SILU) return x * sigmoid_of(x);
  if constexpr (ACTIVATION == TANH) return tanhf(x);
  if constexpr (ACTIVATION == SIGMOID) return sigmoid_of(x);
  if constexpr (ACTIVATION == RELU6) return cut(x, 0.f, 6.f);
  if constexpr (ACTIVATION == HARDSWISH) return x * (cut(x + 3.f, 0.f, 6.f) / 6.f);
  if constexpr (ACTIVATION == HARDSIGMOID) return cut(x + 3.f, 0.f, 6.f) / 6.f;
  if constexpr (ACTIVATION == LEAKY_RELU) return x < 0.f ? first * x : x;
  if constexpr (ACTIVATION == CLAMP) return cut(x, first, second);
  return x;
}
