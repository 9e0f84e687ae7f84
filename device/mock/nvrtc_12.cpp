// libnvrtc.so.12: the compiler of an older toolkit.
#define MOCK_NVRTC_VERSION {12, 4}
#include "nvrtc.cpp"
