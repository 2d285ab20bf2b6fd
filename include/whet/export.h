// Marks what libwhet exports; everything else stays hidden inside the shared library.
#ifndef WHET_EXPORT_H_
#define WHET_EXPORT_H_

#if defined(__GNUC__)
#define WHET_API __attribute__((visibility("default")))
#else
#define WHET_API
#endif

#endif  // WHET_EXPORT_H_
