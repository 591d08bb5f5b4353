{{- define "muxflow.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "muxflow.labels" -}}
app.kubernetes.io/name: {{ . }}
app.kubernetes.io/part-of: muxflow
{{- end }}
