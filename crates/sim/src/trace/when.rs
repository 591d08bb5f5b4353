//! Dates in traces, as seconds. Only differences matter, so time zones and leap seconds do not.

/// Seconds of `YYYY-MM-DD HH:MM:SS[.fff…]` (or with `T` between) since a fixed day.
pub(crate) fn parse(text: &str) -> Option<f64> {
    let text = text.trim();
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.split('-');
    let (year, month, day) = (number(date.next()?)?, number(date.next()?)?, number(date.next()?)?);
    if date.next().is_some() || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let time = time.trim_end_matches('Z');
    let time = time.split(['+', ' ']).next()?;
    let mut clock = time.split(':');
    let (hour, minute) = (number(clock.next()?)?, number(clock.next()?)?);
    let second: f64 = clock.next()?.parse().ok()?;
    if clock.next().is_some()
        || !(0..24).contains(&hour)
        || !(0..60).contains(&minute)
        || !(0.0..61.0).contains(&second)
    {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "days since 1970")]
    let days = days(year, month, day) as f64;
    #[expect(clippy::cast_precision_loss, reason = "minutes of a day")]
    let minutes = (hour * 60 + minute) as f64;
    Some(days * 86_400.0 + minutes * 60.0 + second)
}

fn number(text: &str) -> Option<i64> {
    if text.is_empty() || text.len() > 4 || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// Days since 1970-01-01 in the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let year_of_era = y - era * 400;
    let shifted = (month + 9) % 12;
    let day_of_year = (153 * shifted + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_seconds() {
        assert_eq!(parse("1970-01-02 00:00:01"), Some(86_401.0));
        assert_eq!(parse("2017-10-09 07:01:55").unwrap(), 1_507_532_515.0);
        assert_eq!(
            parse("2000-03-01T00:00:00").unwrap() - parse("2000-02-28 00:00:00").unwrap(),
            172_800.0
        );
        assert!((parse("2023-11-16 18:17:03.9799600").unwrap() % 1.0 - 0.98).abs() < 1e-3);
        for bad in [
            "",
            "x",
            "2017-13-09 07:01:55",
            "2017-10-09",
            "2017-10-09 25:01:55",
            "None",
            "2017-10-09 07:61:55",
            "-1-1-1 1:1:1",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
