// The rows of activation.cpp, included once in namespace numbers and once in vectors, whose `each` calls with the place of one
// element or of 16.

// gelu(x) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)   (arXiv 1606.08415)
constexpr double kSlope = 2 * 0.7978845608028653559, kCubic = 0.044715 * kSlope;

template <class W>
HYBRIDPAR_INLINE W gelu(W x) { return x * sigmoid(x * multiply_add(W(kCubic), x * x, W(kSlope))).value; }

template <class W>
HYBRIDPAR_INLINE W gelu_derivative(W x) {
  const W square = x * x;
  const Sigmoid<W> s = sigmoid(x * multiply_add(W(kCubic), square, W(kSlope)));
  return multiply_add(x * s.value * s.rest, multiply_add(W(3) * W(kCubic), square, W(kSlope)), s.value);
}

template <class T>
HYBRIDPAR_INLINE void gelu_any(const Rows<T>& a, int64_t begin, int64_t end) {
  const Wide<T>* bias = a.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.cols;
    T* y = a.out + row * a.cols;
    if (bias)
      each(a.cols, [=](auto i, auto) { put(y, i, gelu(load(x, i) + load(bias, i))); }, ahead(x), ahead(y));
    else
      each(a.cols, [=](auto i, auto) { put(y, i, gelu(load(x, i))); }, ahead(x), ahead(y));
  }
}

// sums: [cols], of dx; null without bias
template <class T>
HYBRIDPAR_INLINE void gelu_backward_any(const Rows<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {
  const Wide<T>* bias = a.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T *x = a.x + row * a.cols, *dy = a.dy + row * a.cols;
    T* dx = a.out + row * a.cols;
    if (bias)
      each(a.cols, [=](auto i, auto) {
        const auto g = load(dy, i) * gelu_derivative(load(x, i) + load(bias, i));
        put(sums, i, load(sums, i) + g);
        put(dx, i, g);
      }, ahead(x), ahead(dy), ahead(dx));
    else
      each(a.cols, [=](auto i, auto) { put(dx, i, load(dy, i) * gelu_derivative(load(x, i))); },
           ahead(x), ahead(dy), ahead(dx));
  }
}

// x: [rows, 2 cols], gate then up
template <class T>
HYBRIDPAR_INLINE void swiglu_any(const Rows<T>& a, int64_t begin, int64_t end) {
  const int64_t cols = a.cols;
  const Wide<T>* bias = a.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = a.x + row * 2 * cols, *up = gate + cols;
    T* y = a.out + row * cols;
    if (bias)
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i) + load(bias, i), u = load(up, i) + load(bias, cols + i);
        put(y, i, g * sigmoid(g).value * u);
      }, ahead(gate), ahead(up), ahead(y));
    else
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i);
        put(y, i, g * sigmoid(g).value * load(up, i));
      }, ahead(gate), ahead(up), ahead(y));
  }
}

// sums: [2 cols]
template <class T>
HYBRIDPAR_INLINE void swiglu_backward_any(const Rows<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {
  const int64_t cols = a.cols;
  const Wide<T>* bias = a.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = a.x + row * 2 * cols, *up = gate + cols, *dy = a.dy + row * cols;
    T *dgate = a.out + row * 2 * cols, *dup = dgate + cols;
    if (bias)
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i) + load(bias, i), u = load(up, i) + load(bias, cols + i), d = load(dy, i);
        const auto s = sigmoid(g);
        const auto along = d * u * multiply_add(g * s.value, s.rest, s.value), across = d * g * s.value;
        put(sums, i, load(sums, i) + along);
        put(sums, cols + i, load(sums, cols + i) + across);
        put(dgate, i, along);
        put(dup, i, across);
      }, ahead(gate), ahead(up), ahead(dy), ahead(dgate), ahead(dup));
    else
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i), d = load(dy, i);
        const auto s = sigmoid(g);
        put(dgate, i, d * load(up, i) * multiply_add(g * s.value, s.rest, s.value));
        put(dup, i, d * g * s.value);
      }, ahead(gate), ahead(up), ahead(dy), ahead(dgate), ahead(dup));
  }
}

// gelu(gate) * up, of the same x
template <class T>
HYBRIDPAR_INLINE void geglu_any(const Rows<T>& a, int64_t begin, int64_t end) {
  const int64_t cols = a.cols;
  const Wide<T>* bias = a.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = a.x + row * 2 * cols, *up = gate + cols;
    T* y = a.out + row * cols;
    if (bias)
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i) + load(bias, i), u = load(up, i) + load(bias, cols + i);
        put(y, i, gelu(g) * u);
      }, ahead(gate), ahead(up), ahead(y));
    else
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i);
        put(y, i, gelu(g) * load(up, i));
      }, ahead(gate), ahead(up), ahead(y));
  }
}

template <class T>
HYBRIDPAR_INLINE void geglu_backward_any(const Rows<T>& a, int64_t begin, int64_t end, Wide<T>* sums) {
  const int64_t cols = a.cols;
  const Wide<T>* bias = a.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = a.x + row * 2 * cols, *up = gate + cols, *dy = a.dy + row * cols;
    T *dgate = a.out + row * 2 * cols, *dup = dgate + cols;
    if (bias)
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i) + load(bias, i), u = load(up, i) + load(bias, cols + i), d = load(dy, i);
        const auto along = d * u * gelu_derivative(g), across = d * gelu(g);
        put(sums, i, load(sums, i) + along);
        put(sums, cols + i, load(sums, cols + i) + across);
        put(dgate, i, along);
        put(dup, i, across);
      }, ahead(gate), ahead(up), ahead(dy), ahead(dgate), ahead(dup));
    else
      each(cols, [=](auto i, auto) {
        const auto g = load(gate, i), d = load(dy, i);
        put(dgate, i, d * load(up, i) * gelu_derivative(g));
        put(dup, i, d * gelu(g));
      }, ahead(gate), ahead(up), ahead(dy), ahead(dgate), ahead(dup));
  }
}
