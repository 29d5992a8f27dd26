#include "products.h"

template void product_of_digits<1>(const Matrix&, const float*, int, int64_t, int64_t, const AnyFinish&);
