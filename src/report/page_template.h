// The page as src/report/page has it, with D3 inside, made by page.cmake when whet is built. "@data@" stands
// where the data go.
#ifndef WHET_REPORT_PAGE_TEMPLATE_H_
#define WHET_REPORT_PAGE_TEMPLATE_H_

#include <span>

namespace whet::report {

std::span<const unsigned char> page_template();

}  // namespace whet::report

#endif  // WHET_REPORT_PAGE_TEMPLATE_H_
