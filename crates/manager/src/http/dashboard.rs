//! The dashboard: a page, a style sheet and two scripts, compiled into the program. They need no
//! network beyond the API, and no build step.

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Redirect};
use axum::routing::get;

const FILES: [(&str, &str, &str); 4] = [
    ("/dashboard", "text/html; charset=utf-8", include_str!("../../dashboard/index.html")),
    ("/dashboard/style.css", "text/css; charset=utf-8", include_str!("../../dashboard/style.css")),
    (
        "/dashboard/charts.js",
        "text/javascript; charset=utf-8",
        include_str!("../../dashboard/charts.js"),
    ),
    ("/dashboard/app.js", "text/javascript; charset=utf-8", include_str!("../../dashboard/app.js")),
];

/// Nothing from elsewhere is loaded, and no other site may frame the page.
const POLICY: &str = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'";

/// The pages.
pub fn pages() -> Router {
    let mut router = Router::new().route("/", get(|| async { Redirect::temporary("/dashboard") }));
    for (path, kind, text) in FILES {
        let answer = move || async move {
            let headers = [
                (header::CONTENT_TYPE, kind),
                (header::CONTENT_SECURITY_POLICY, POLICY),
                (header::CACHE_CONTROL, "no-cache"),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            ];
            (headers, text).into_response()
        };
        router = router.route(path, get(answer));
    }
    router
}
